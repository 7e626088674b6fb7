"""What only a GPU has: CUDA graphs, and kernels in Triton's language. Tested elsewhere by stand-ins."""
