"""The only package that knows Triton: requests from its tensors, responses to its tensors, and its models.

`tensors` has the tables that config.pbtxt is generated from. `triton_python_backend_utils` has its classes only
once Triton calls `initialize`, so it is imported there, as a module, and passed on.
"""
