"""Recurrent layers, which keep one state of fixed size for each sequence instead of keys and values."""
