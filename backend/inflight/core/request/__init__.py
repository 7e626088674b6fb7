"""Requests: the client's request, the state of each sequence, and the responses. Pure."""
