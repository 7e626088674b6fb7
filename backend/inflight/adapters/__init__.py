"""LoRA adapters outside of the iteration loop: the meaning of their tensors, their sources, and their cache."""
