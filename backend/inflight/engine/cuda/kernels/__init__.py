"""Kernels for GPUs in Triton's language, and what launches them.

Imported only where they are asked for: the package `triton` comes with torch's builds for CUDA, and elsewhere it
may be missing. With TRITON_INTERPRET=1 in the environment before the import they run on a CPU, slowly, which is
how they are tested without a GPU.
"""
