"""The batcher's pure core: scheduling, KV blocks and request life cycles on plain integers.

Standard library only: no torch, numpy, MPI, Triton, threads or clock reads. Everything here is a function of
its inputs, so that it can be simulated, recorded, replayed and run in step on several ranks.
"""
