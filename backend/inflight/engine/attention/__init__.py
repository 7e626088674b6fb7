"""Attention over the paged KV cache: one interface, and what implements it on torch's tensors."""
