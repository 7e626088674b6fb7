"""The only package that knows Triton: requests, responses, models and their config.pbtxt, metrics.

The meaning of tensors is in `inflight.tensors`. `triton_python_backend_utils` has its classes only after
Triton has called `initialize`. So `initialize` imports the module and passes it on.
"""
