"""Requests: what was asked, the state of each sequence, and the responses that go back. Pure."""
