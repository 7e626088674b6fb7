"""The device side: a model's forward pass over a paged KV cache, on a CPU, an NVIDIA GPU or TensorRT.

The package owns device memory. It is independent of requests and queues: each ScheduledBatch lists the work of one
iteration. Used on the loop thread.
"""
