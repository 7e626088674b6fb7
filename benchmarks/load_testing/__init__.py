"""Code shared by `scripts/bench aiperf` and `scripts/bench genai-perf`: environments, exports, comparison."""
