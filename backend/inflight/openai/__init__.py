"""OpenAI's HTTP protocol in front of an engine client, in a process of its own.

`protocol` and `sampling` convert a body to core requests, an `EngineSession` runs them, and the routes
convert their outputs to OpenAI's JSON. Only this package knows the protocol. It does not import torch.
"""
