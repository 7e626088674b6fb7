"""The page at `/`, a playground for the served model, with a few figures of the engine's activity.

`page/` has the page's parts, which `routes` joins into one document. The page sends only ordinary requests of
the protocol.
"""
