"""The tensors of requests and responses: their tables and their meaning. Needs numpy, but not Triton.

`spec` defines a row of the tables, and `reader` reads the value of the tensor that a row describes.
`requests` converts a client's inputs to Requests, and `output_arrays` converts results to output tensors.
"""
