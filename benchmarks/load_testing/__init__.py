"""What `scripts/bench aiperf` and `scripts/bench genai-perf` share: environments, exports, and the comparison."""
