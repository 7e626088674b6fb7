"""GGUF files (llama.cpp's format) as checkpoint folders.

`folder.py` writes config.json, tokenizer.json and the files beside them from a file's header, so that everything
else reads a checkpoint folder; `header.py` reads the header, `config.py` and `tokenizer.py` translate it. The
tensors stay in the file, where `inflight.models.gguf_tensors` reads them. Runs without torch; any thread.
"""
