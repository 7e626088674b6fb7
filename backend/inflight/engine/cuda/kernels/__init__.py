"""GPU kernels in Triton's language, and the functions that launch them.

Imported on demand: the package `triton` comes with torch's CUDA builds and may be missing elsewhere. With
TRITON_INTERPRET=1 in the environment before the import, the kernels run (slowly) on a CPU, which is how they are
tested without a GPU.
"""
