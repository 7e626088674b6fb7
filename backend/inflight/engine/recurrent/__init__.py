"""Layers that remember a sequence as one state of fixed size, instead of the keys and values of its tokens."""
