"""Recovery from a failed iteration: finds the faulty request and recomputes the others. Pure."""
