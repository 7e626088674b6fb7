"""OpenAI's HTTP protocol in front of an engine client, in a process of its own.

A body becomes core requests (`protocol`, `sampling`), an `EngineSession` runs them, and the routes turn their
outputs into OpenAI's JSON. No other package knows this protocol. Imports no torch.
"""
