"""The scheduling: which requests wait, start and run, with how many tokens, and the batch for the device.

Pure.
"""
