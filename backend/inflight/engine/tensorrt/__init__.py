"""Builds TensorRT networks from checkpoints and plans from networks, and runs the plans.

`build.py` is the entry point of `scripts/build`. It needs no GPU: the folder that it writes, with two plans
(layers, logits) and a description (`sidecar.py`) for each rank, runs on a machine with TensorRT and a GPU.
"""
