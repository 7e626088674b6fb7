"""The page at `/`: a playground for the served model, which also shows the engine's activity in a few figures.

`page/` has the page's parts, which `routes` joins to one document. The page generates text by ordinary
requests of OpenAI's protocol.
"""
