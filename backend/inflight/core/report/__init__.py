"""Statistics, metrics, and the answers to `state` requests. Pure."""
