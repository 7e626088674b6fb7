"""The device side: what every device shares, and a folder for each device that has an engine."""
