"""The parts of `compare`: the sides' processes, the checks before they start, and the summary of their figures."""
