"""The KV cache: its blocks, who holds them, what they are found by, and which is evicted first. Pure."""
