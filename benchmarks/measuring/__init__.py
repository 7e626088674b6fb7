"""Code shared by `offline`, `serve` and `compare`: workload, options, figures, and their setup."""
