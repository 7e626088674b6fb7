"""Start a real tritonserver on this repository's models, and end it without leftovers.

`python -m inflight.server` is the command behind `scripts/serve`; `launch.serve` is the same as a context
manager. Nothing here knows what the models do: `parameters` of config.pbtxt are read and filled in as text.
"""
