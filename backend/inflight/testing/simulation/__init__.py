"""A simulated server: a random seed decides its clock, its requests, its device and the device's failures.

The scheduler is the real one. Oracles, naive models of what it must do, check each of its decisions.
"""
