"""The engine endpoint: how front ends reach the one batcher, within its process or over a Unix socket.

`local` is the batcher's side and the client of front ends in the same process. `server` and `client` carry the
same calls between processes, in `frames`, over a socket that `path` finds; over the same socket `supervision`
tells other processes whether the engine lives. `delivery` is the way of responses to any consumer that may be
slower than the engine.
"""
