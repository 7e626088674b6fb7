"""Requests: what was asked, a request's life, and what goes back. Pure."""
