"""Start a real tritonserver on this repository's models and take it down again without leftovers.

`python -m inflight.server` is the command behind `scripts/serve`; `launch.serve` is the same as a context
manager. Nothing here knows what the models do: it reads and fills `parameters` of config.pbtxt as text.
"""
