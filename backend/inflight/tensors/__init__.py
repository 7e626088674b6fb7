"""The tensors of requests and responses: their tables, and what they mean. Needs numpy, and neither Triton nor a server.

`spec` says what a row of a table is, and `reader` reads one row's values; `requests` makes a Request of a request's
inputs.
"""
