"""What `offline`, `serve` and `compare` share: the workload, options, figures, and what these depend on."""
