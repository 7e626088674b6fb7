"""Code shared by `offline`, `serve` and `compare`: workload, options, figures, and the setup they depend on."""
