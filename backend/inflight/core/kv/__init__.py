"""KV cache: blocks, who holds them, what they are found by, and what is evicted first. Pure."""
