"""The tensors of requests and responses: their tables, and what they mean. Needs numpy, and no Triton.

`spec` says what a row of a table is, and `reader` reads values by these rows; `requests` makes Requests of a
client's inputs, and `output_arrays` makes the outputs of results.
"""
