"""The only package that knows Triton: tensors to requests, responses to tensors, and who still waits.

`tensors` is the table that config.pbtxt is generated from. `triton_python_backend_utils` has its classes only
once Triton calls `initialize`, so it is taken there, as a module, and passed on.
"""
