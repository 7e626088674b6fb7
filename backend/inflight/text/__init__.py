"""Conversion between text and token ids: tokenizer and incremental detokenizer. Needs no torch."""
