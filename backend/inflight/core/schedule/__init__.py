"""Scheduling: which requests wait, start and run, with how many tokens, and the device's batch. Pure."""
