"""OpenAI's HTTP protocol in front of an engine client: a process of its own, the only package that knows it.

A body becomes core requests (`protocol`, `sampling`), an `EngineSession` runs them, and routes make what OpenAI's
clients read of their outputs. Imports no torch.
"""
