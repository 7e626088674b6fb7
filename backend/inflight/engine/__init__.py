"""The device side: a model's forward pass over a paged KV cache, on a CPU, an NVIDIA GPU or TensorRT.

It owns device memory, and knows neither requests nor queues: it is told what to run by ScheduledBatch values, on
one thread, the loop's.
"""
