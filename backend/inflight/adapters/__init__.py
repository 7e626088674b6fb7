"""LoRA adapters outside of the loop: the meaning of their tensors, their sources, and their cache."""
