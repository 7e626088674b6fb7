"""Statistics, metrics and the state that people ask for. Pure."""
