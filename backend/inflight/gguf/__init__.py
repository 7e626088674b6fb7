"""GGUF files (llama.cpp's format) as checkpoint folders.

`folder.py` makes a checkpoint folder for a GGUF file, with config.json, tokenizer.json and further files, which
all other code reads. `header.py` reads the file's header; `config.py`, with `families.py` and
`recurrent_families.py` for single architectures, and `tokenizer.py` convert it to these files. The tensors stay
in the GGUF file, from which `inflight.models.gguf_tensors` reads them by the names that `tensor_names.py`
finds. Runs without torch; any thread.
"""
