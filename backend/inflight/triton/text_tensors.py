"""The tensors of `preprocessing` and `postprocessing`, under tensorrtllm_backend's names.

Left out are those of image, video and encoder-decoder models and the words-to-bias pair; a client that sends
one is told by Triton that the input does not exist.
"""

from __future__ import annotations

from inflight.triton.tensor_spec import TensorSpec, TensorTable

PREPROCESSING_INPUTS = TensorTable(
    (
        TensorSpec("QUERY", "BYTES", (1,), "prompt as UTF-8 text; required"),
        TensorSpec("REQUEST_OUTPUT_LEN", "INT32", (1,), "handed through"),
        TensorSpec("BAD_WORDS_DICT", "BYTES", (-1,), "texts to tokenize"),
        TensorSpec("STOP_WORDS_DICT", "BYTES", (-1,), "texts to tokenize"),
        TensorSpec("END_ID", "INT32", (1,), "handed through; the tokenizer's by default"),
        TensorSpec("PAD_ID", "INT32", (1,), "handed through; the tokenizer's by default"),
    )
)

PREPROCESSING_OUTPUTS = TensorTable(
    (
        TensorSpec("INPUT_ID", "INT32", (-1,), "prompt token ids"),
        TensorSpec("REQUEST_INPUT_LEN", "INT32", (1,), "their number"),
        TensorSpec("BAD_WORDS_IDS", "INT32", (2, -1), "as tensorrt_llm's bad_words_list"),
        TensorSpec("STOP_WORDS_IDS", "INT32", (2, -1), "as tensorrt_llm's stop_words_list"),
        TensorSpec("REQUEST_OUTPUT_LEN", "INT32", (1,), "handed through"),
        TensorSpec("OUT_END_ID", "INT32", (1,), "handed through"),
        TensorSpec("OUT_PAD_ID", "INT32", (1,), "handed through"),
    )
)

POSTPROCESSING_INPUTS = TensorTable(
    (
        TensorSpec("TOKENS_BATCH", "INT32", (-1, -1), "[beams, n] token ids; required"),
        TensorSpec("SEQUENCE_LENGTH", "INT32", (-1,), "[beams] how many of them count; all by default"),
    )
)

POSTPROCESSING_OUTPUTS = TensorTable(
    (TensorSpec("OUTPUT", "BYTES", (-1,), "text of each beam", is_batched=False),)
)
