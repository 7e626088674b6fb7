"""The KV cache: blocks, their owners, the keys by which they are found, and the order of eviction. Pure."""
