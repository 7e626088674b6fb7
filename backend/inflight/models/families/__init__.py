"""One small map a family: its config.json → DecoderConfig, and the names of its tensors."""
