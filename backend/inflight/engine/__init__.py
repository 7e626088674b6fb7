"""The device side: a model's forward pass over a paged KV cache, on a CPU, an NVIDIA GPU or TensorRT.

The package owns device memory and knows neither requests nor queues: a ScheduledBatch lists what to run, on the
loop thread.
"""
