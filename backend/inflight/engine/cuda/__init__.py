"""The parts that need a GPU: CUDA graphs, and kernels in Triton's language. Without a GPU, tests use stand-ins."""
