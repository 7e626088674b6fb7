"""TensorRT as a device: networks from checkpoints, plans from networks.

`build.py` is the way in of `scripts/build`. It needs no GPU: what it leaves in a folder, a plan for the layers and
one for the logits with a description (`sidecar.py`) for each rank, runs where TensorRT and a GPU are.
"""
