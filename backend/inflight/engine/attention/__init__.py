"""Attention over the paged KV cache: one interface, and its implementations on torch's tensors."""
