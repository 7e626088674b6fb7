"""The only package that knows Triton: its requests and responses, its models and their config.pbtxt, its metrics.

What tensors mean is in `inflight.tensors`. `triton_python_backend_utils` has its classes only once Triton calls
`initialize`, so it is imported there, as a module, and passed on.
"""
