"""Guided decoding: which tokens a guide allows next, computed by one of two grammar libraries.

    vocabulary.py          the bytes of every token: everything a library has to know about a model
    backend.py             the interface of a library; `make_backend`
    llguidance_backend.py  the default
    xgrammar_backend.py    optional
    structural_tags.py     structural tags as a grammar that llguidance reads
    compiler.py            the engine's side of the compiling process, and the known guides
    child.py               that process
    grammars.py            compiled guides on the rank that samples

A guide comes from a client, and some guides take for ever or all memory to compile. So a separate process compiles
each guide first, within bounds, and is killed if it exceeds them; only guides proved there reach the engine.
`inflight.sampling.guides` applies the masks to logits. This package knows neither Triton nor the loop.
"""
