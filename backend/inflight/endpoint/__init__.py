"""The engine endpoint: how front ends reach the batcher, in its process or over a Unix socket.

`local` is the engine client for front ends in the batcher's process. `server` and `client` carry the same calls
between processes as `frames` over a socket found by `path`; over the same socket `supervision` tells other
processes whether the engine is alive. `delivery` queues responses for consumers that may be slower than the
engine.
"""
