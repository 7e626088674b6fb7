"""The engine endpoint: how front ends reach the batcher, in its process or over a Unix socket.

`local` is the engine client for front ends in the batcher's process. `server` and `client` transmit the same
calls between processes, as `frames` over a Unix socket; `path` finds the socket. Over the same socket
`supervision` reports to other processes whether the engine is alive. `delivery` queues responses for
consumers that may be slower than the engine.
"""
