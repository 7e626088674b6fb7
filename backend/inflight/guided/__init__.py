"""Guided decoding: which tokens a guide allows next, computed by one of two grammar libraries.

    vocabulary.py          the bytes of every token: all that a library needs to know about a model
    backend.py             the interface of a library; `make_backend`
    llguidance_backend.py  the default
    xgrammar_backend.py    optional
    structural_tags.py     structural tags as a grammar that llguidance reads
    compiler.py            the engine's side of the compiling process, and the known guides
    child.py               the compiling process
    grammars.py            compiled guides on the rank that samples

A guide comes from a client, and compiling it may take unlimited time or memory. So a separate process
compiles each guide first, within limits, and is killed if it exceeds them. Only guides that were compiled
there reach the engine. `inflight.sampling.guides` applies the masks to logits.
"""
