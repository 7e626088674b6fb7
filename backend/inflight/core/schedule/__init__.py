"""Which requests wait, start and run, with how many tokens, and the batch that a device gets. Pure."""
