"""Several ranks in lockstep: their topology, start, connections, heartbeat and end."""
