"""Ranks: which part of the model each has, and how they talk. Knows neither Triton nor the loop."""
