"""`python -m inflight.dynamo`: a worker of NVIDIA Dynamo, which passes requests on to the engine of a server.

Dynamo's frontend tokenizes prompts, chooses a worker by the KV cache, and turns tokens into text; this worker
gets and returns token ids. `engine` is Dynamo's `LLMEngine` over the engine endpoint; `requests` and `chunks`
convert its requests and answers without importing Dynamo, which is installed in the worker's own environment.
"""
