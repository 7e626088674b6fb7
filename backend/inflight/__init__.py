"""In-flight batching for large language models behind Triton Inference Server."""
