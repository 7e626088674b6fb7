"""A server whose clock, requests, device and failures come from a seed, with oracles of what must be true."""
