"""Recovery from a failed iteration: which request is at fault, and how the others go on. Pure."""
