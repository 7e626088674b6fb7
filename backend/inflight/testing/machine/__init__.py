"""A simulated machine: processes, threads, clocks and sockets in one thread, in an order that a seed chooses.

The server's own code runs on it: `modules.py` replaces the modules `threading`, `time`, `socket` and `queue` where
the package uses them. Simulated threads are greenlets. They take turns when they wait, and sometimes when they use
a lock, an event, a queue or a socket.
"""
