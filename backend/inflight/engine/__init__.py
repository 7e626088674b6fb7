"""The device side: a model's forward pass over a paged KV cache, on a CPU, an NVIDIA GPU or TensorRT.

It owns device memory, and knows neither requests nor queues: ScheduledBatch values tell it what to run, on the
loop thread.
"""
