"""The batcher's pure core: scheduling, KV blocks and request life cycles on plain integers.

Standard library only: no torch, numpy, MPI, Triton, threads or clock reads. All results depend on inputs alone, so
that the core can be simulated, recorded, replayed and run in lockstep on several ranks.
"""
