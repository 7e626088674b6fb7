"""What `compare` is made of: the sides' processes, what is checked before, and what their figures come to."""
