"""Several ranks in step: their topology, start, connections, heartbeat and end."""
