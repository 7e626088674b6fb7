"""Text on the outside, token ids on the inside: tokenizer and incremental detokenizer. Needs no torch."""
