"""Guided decoding: what a guide allows to come next, by one of two libraries.

    vocabulary.py          the bytes of every token: all that a library has to know of a model
    backend.py             what is asked of a library; `make_backend`
    llguidance_backend.py  the default
    xgrammar_backend.py    for those who install it
    structural_tags.py     structural tags as a grammar that llguidance reads
    compiler.py            the engine's side of the process that compiles guides, and what is known of them
    child.py               that process
    grammars.py            what the rank that chooses tokens keeps of compiled guides

A guide comes from anybody, and some take for ever, or all memory. So a process beside the engine compiles it
first, within bounds, and is killed where they are exceeded; only what it has proved goes into the engine. How
masks change logits is the business of `inflight.sampling.guides`. Knows neither Triton nor the loop.
"""
