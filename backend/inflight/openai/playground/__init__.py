"""The page at `/`, on which a person tries the served model, and a few figures of what the engine is doing.

`page/` has the page's parts, which `routes` joins into one document. Knows the protocol no better than any client:
the page sends the requests that everybody sends.
"""
