"""The only package that knows Triton: requests, responses, models and their config.pbtxt, metrics.

`inflight.tensors` defines what the tensors mean. The module `triton_python_backend_utils` has no classes
before Triton calls `initialize`, so `initialize` imports it and passes it to the other functions.
"""
