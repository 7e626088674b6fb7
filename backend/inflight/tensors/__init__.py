"""The tensors of requests and responses: their tables and their meaning. Needs numpy, but not Triton.

`spec` defines a row of a table, and `reader` reads values by these rows; `requests` converts a client's inputs to
Requests, and `output_arrays` converts results to output tensors.
"""
