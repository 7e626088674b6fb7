"""The parts that need a GPU: CUDA graphs, and kernels in Triton's language. Tested elsewhere by stand-ins."""
