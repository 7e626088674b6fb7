"""Start a real tritonserver on this repository's models, and end it with all of its processes and files.

`python -m inflight.server` is the command behind `scripts/serve`; `launch.serve` is a context manager that
starts a server in the same way. This package does not import the models: it reads and fills in `parameters`
of config.pbtxt as text.
"""
