"""The tables of tensors of `preprocessing`, `postprocessing` and `multimodal_encoders`.

The names are tensorrtllm_backend's; `multimodal_encoders` takes pictures under the names of `preprocessing`,
which also returns the outputs of tensorrtllm_backend's `multimodal_encoders`.

Tensors that only video and encoder-decoder models use, or that tensorrtllm_backend's encoders get from its
`preprocessing`, are declared as there: such inputs are refused, and such outputs are never returned.
"""

from __future__ import annotations

from inflight.tensors.spec import NO_ENCODER, NO_VIDEO, TensorSpec, TensorTable, of_other_models

_PICTURES = (
    TensorSpec(
        "IMAGE_BYTES",
        "UINT8",
        (-1, -1, -1, -1),
        "[pictures, height, width, 3] or [pictures, 3, height, width]: RGB pixels of pictures",
    ),
    TensorSpec(
        "IMAGE_SIZES",
        "INT64",
        (-1, 2),
        "[pictures, 2]: height and width of each picture in IMAGE_BYTES, if that is padded",
    ),
    TensorSpec("IMAGE_URL", "BYTES", (-1,), "in place of IMAGE_BYTES: URLs of pictures"),
    TensorSpec("IMAGES", "BYTES", (-1,), "in place of IMAGE_BYTES: files of pictures, such as PNG or JPEG"),
)
_TABLE_OUTPUTS = (
    TensorSpec(
        "OUT_PROMPT_EMBEDDING_TABLE", "FP32", (-1, -1), "rows of all pictures, for prompt_embedding_table"
    ),
    TensorSpec("OUT_PROMPT_VOCAB_SIZE", "INT32", (1,), "number of rows"),
)

PREPROCESSING_INPUTS = TensorTable(
    (
        TensorSpec("QUERY", "BYTES", (1,), "the prompt as UTF-8 text; required"),
        TensorSpec("REQUEST_OUTPUT_LEN", "INT32", (1,), "copied to the outputs"),
        TensorSpec("BAD_WORDS_DICT", "BYTES", (-1,), "texts to tokenize"),
        TensorSpec("STOP_WORDS_DICT", "BYTES", (-1,), "texts to tokenize"),
        TensorSpec("EMBEDDING_BIAS_WORDS", "BYTES", (-1,), "texts whose tokens get a bias"),
        TensorSpec(
            "EMBEDDING_BIAS_WEIGHTS",
            "FP32",
            (-1,),
            "bias for the tokens of each text in EMBEDDING_BIAS_WORDS",
        ),
        TensorSpec("END_ID", "INT32", (1,), "copied to the outputs; default: the tokenizer's id"),
        TensorSpec("PAD_ID", "INT32", (1,), "copied to the outputs; default: the tokenizer's id"),
        TensorSpec("PROMPT_TABLE_EXTRA_ID", "UINT64", (1,), "extra id of all rows of a prompt table"),
        TensorSpec(
            "PROMPT_VOCAB_SIZE", "INT32", (1,), "number of rows of a prompt table; their ids are put first"
        ),
        of_other_models(
            "DECODER_QUERY", "BYTES", (1,), "prompt of the decoder of an encoder-decoder model", NO_ENCODER
        ),
        *_PICTURES,
        of_other_models("VIDEO_BYTES", "UINT8", (-1, -1, -1, -1), "frames of a video", NO_VIDEO),
    )
)

PREPROCESSING_OUTPUTS = TensorTable(
    (
        TensorSpec("INPUT_ID", "INT32", (-1,), "prompt token ids"),
        TensorSpec("REQUEST_INPUT_LEN", "INT32", (1,), "number of prompt token ids"),
        TensorSpec("DECODER_INPUT_ID", "INT32", (-1,), "the padding id alone"),
        TensorSpec("REQUEST_DECODER_INPUT_LEN", "INT32", (1,), "1"),
        TensorSpec("BAD_WORDS_IDS", "INT32", (2, -1), "ids in the layout of tensorrt_llm's bad_words_list"),
        TensorSpec("STOP_WORDS_IDS", "INT32", (2, -1), "ids in the layout of tensorrt_llm's stop_words_list"),
        TensorSpec("EMBEDDING_BIAS", "FP32", (-1,), "[vocab_size]; empty without biased words"),
        TensorSpec("REQUEST_OUTPUT_LEN", "INT32", (-1,), "copied to the outputs"),
        TensorSpec("OUT_END_ID", "INT32", (1,), "copied to the outputs"),
        TensorSpec("OUT_PAD_ID", "INT32", (1,), "copied to the outputs"),
        TensorSpec(
            "OUT_PROMPT_TABLE_EXTRA_IDS",
            "UINT64",
            (-1,),
            "for each row PROMPT_TABLE_EXTRA_ID, or without it an id of the picture's row; 0 for text",
        ),
        *_TABLE_OUTPUTS,
        TensorSpec(
            "MROPE_ROTARY_COS_SIN",
            "FP32",
            (-1,),
            "with pictures, for models with multimodal rotary embedding: mrope_rotary_cos_sin",
        ),
        TensorSpec("MROPE_POSITION_DELTAS", "INT64", (1,), "with it: mrope_position_deltas"),
        of_other_models("PIXEL_VALUES", "FP16", (-1, -1, -1, -1), "for image models only"),
        of_other_models("ASPECT_RATIO_IDS", "INT64", (-1,), "for image models only"),
        of_other_models("ASPECT_RATIO_MASK", "INT64", (-1, -1), "for image models only"),
        of_other_models("CROSS_ATTENTION_MASK", "INT64", (-1, -1, -1), "for image models only"),
        of_other_models("IMAGE_SIZES", "INT64", (-1, 2), "for image models only"),
        of_other_models("IS_VIDEO_INPUT", "BOOL", (1,), "for video models only"),
        of_other_models("ATTENTION_MASK", "INT64", (-1,), "for image models only"),
        of_other_models("IMAGE_GRID_THW", "INT64", (3,), "for image models only"),
        of_other_models("VISION_INPUT_ID", "INT32", (-1,), "for image models only"),
    )
)

POSTPROCESSING_INPUTS = TensorTable(
    (
        TensorSpec("TOKENS_BATCH", "INT32", (-1, -1), "[beams, n] token ids; required"),
        TensorSpec("SEQUENCE_LENGTH", "INT32", (-1,), "[beams] number of valid ids; default: all"),
    )
)

POSTPROCESSING_OUTPUTS = TensorTable(
    (TensorSpec("OUTPUT", "BYTES", (-1,), "text of each beam", is_batched=False),)
)

ENCODERS_INPUTS = TensorTable(_PICTURES)

ENCODERS_OUTPUTS = TensorTable(_TABLE_OUTPUTS)
