"""Programs that run the benchmark workload on other systems, each in that system's own environment."""
