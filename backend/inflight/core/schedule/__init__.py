"""Who waits, who starts, who runs now with how many tokens, and the batch that a device gets. Pure."""
