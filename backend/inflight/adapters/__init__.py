"""LoRA adapters beside the loop: what their tensors mean, where they come from, and the cache that keeps them."""
