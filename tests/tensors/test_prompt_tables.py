"""Tensors of prompt tables: their meaning, and the errors for invalid ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.arrays import BFLOAT16, are_finite, to_prompt_table
from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.request import Request
from inflight.errors import InvalidArgument, Unsupported
from inflight.prompt import Prompt
from inflight.serving.reply import new_text
from inflight.tensors.requests import ServingContext, convert
from inflight.tensors.spec import Vocabulary
from inflight.text.tokenizer import Tokenizer
from tests.tensors.factories import (
    make_context,
    make_description,
    make_limits,
    make_rows,
    text_inputs,
    token_inputs,
)

HIDDEN, VOCABULARY_SIZE = 6, 1000
TABLE = np.arange(3 * HIDDEN, dtype=np.float16).reshape(1, 3, HIDDEN)
EXTRA = 2**64 - 1
DEMO_MODEL = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1" / "demo_model"


class Letters:
    """A TextEncoder with an id for each letter."""

    def prompts(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text] for text in texts]


def context() -> ServingContext:
    limits = replace(make_limits(), hidden_size=HIDDEN)
    return make_context(description=make_description(limits=limits), encoder=Letters())


def prompts_of(vocabulary: Vocabulary = Vocabulary.TOKENS, **tensors: Any) -> tuple[Prompt, ...]:
    inputs = token_inputs(**tensors) if vocabulary is Vocabulary.TOKENS else text_inputs(**tensors)
    return convert(make_rows(inputs, vocabulary), context())


def request_of(vocabulary: Vocabulary = Vocabulary.TOKENS, **tensors: Any) -> Request:
    (prompt,) = prompts_of(vocabulary, **tensors)
    return prompt.request


def test_ids_table_and_extra_ids_are_read() -> None:
    request = request_of(
        input_ids=[[1002, 5, 1000]],
        prompt_embedding_table=TABLE,
        prompt_vocab_size=3,
        prompt_table_extra_ids=[[EXTRA, 0, EXTRA]],
    )
    assert request.input_token_ids == (1002, 5, 1000)
    table = request.prompt_table
    assert table is not None and table.rows == Matrix((3, HIDDEN), "float16", RawBuffer(TABLE.tobytes()))
    assert table.digest != b""
    assert request.identity.extra_ids == (EXTRA, 0, EXTRA)


def test_extra_ids_of_a_padded_prompt_are_cut_with_it() -> None:
    request = request_of(
        input_ids=[[1000, 5, 0, 0]],
        input_lengths=2,
        prompt_embedding_table=TABLE,
        prompt_table_extra_ids=[[7, 0, 0, 0]],
    )
    assert (request.input_token_ids, request.identity.extra_ids) == ((1000, 5), (7, 0))


@pytest.mark.parametrize("extra_id", [None, 0, EXTRA])
def test_virtual_tokens_come_before_those_of_the_text(extra_id: int | None) -> None:
    request = request_of(
        Vocabulary.TEXT, text_input=b"ab", prompt_embedding_table=TABLE, prompt_table_extra_id=extra_id
    )
    assert request.input_token_ids == (1000, 1001, 1002, 97, 98)
    assert request.identity.extra_ids == ((EXTRA,) * 3 + (0, 0) if extra_id else ())
    plain = request_of(Vocabulary.TEXT, text_input=b"ab", prompt_table_extra_id=extra_id)
    assert plain.input_token_ids == (97, 98) and plain.identity.extra_ids == ()


def test_text_input_may_have_a_table_under_tensorrt_llms_names() -> None:
    sent = {"input_ids": None, "text_input": b"ab", "prompt_embedding_table": TABLE}
    request = request_of(**sent, prompt_table_extra_ids=[[7, 7, 7, 0, 0]])
    assert request.input_token_ids == (1000, 1001, 1002, 97, 98)
    assert request.identity.extra_ids == (7, 7, 7, 0, 0)
    with pytest.raises(InvalidArgument, match=r"one id for each of the 5 prompt tokens, got 2"):
        request_of(**sent, prompt_table_extra_ids=[[7, 7]])


def test_each_prompt_of_a_batch_has_its_table() -> None:
    first, second = prompts_of(
        input_ids=[[1000], [1001]],
        request_output_len=np.array([2, 2], np.int32),
        prompt_embedding_table=np.concatenate([TABLE, TABLE + np.float16(1)]),
    )
    assert first.request.prompt_table.rows.buffer.data == TABLE.tobytes()
    assert second.request.prompt_table.rows.buffer.data == (TABLE + np.float16(1)).tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, BFLOAT16], ids=["FP16", "FP32", "BF16"])
def test_a_table_may_have_every_declared_data_type(dtype: Any) -> None:
    table = np.zeros((1, 2, HIDDEN), dtype)
    name = "bfloat16" if dtype is BFLOAT16 else np.dtype(dtype).name
    found = request_of(prompt_embedding_table=table).prompt_table
    assert found.rows == Matrix((2, HIDDEN), name, RawBuffer(table.tobytes()))


def with_number(dtype: Any, value: Any) -> np.ndarray:
    table = np.zeros((1, 2, HIDDEN), np.uint16 if dtype is BFLOAT16 else dtype)
    table[0, 1, 2] = value
    return table.view(dtype)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"prompt_embedding_table": TABLE, "prompt_vocab_size": 4}, "prompt_vocab_size is 4, .* has 3 rows"),
        ({"prompt_vocab_size": 4}, "prompt_vocab_size is 4, but prompt_embedding_table is missing"),
        ({"prompt_embedding_table": TABLE[..., :5]}, r"must have shape \[1, rows, 6\].*got \[1, 3, 5\]"),
        ({"prompt_embedding_table": TABLE[0, 0]}, r"must have shape \[1, n, n\], got \[6\]"),
        ({"prompt_embedding_table": TABLE.astype(np.int32)}, "must be FP16 or FP32 or BF16, got int32"),
        ({"prompt_embedding_table": with_number(np.float16, np.nan)}, "must hold finite numbers"),
        ({"prompt_embedding_table": with_number(np.float32, np.inf)}, "must hold finite numbers"),
        ({"prompt_embedding_table": with_number(BFLOAT16, 0xFF80)}, "must hold finite numbers"),
        ({"prompt_embedding_table": TABLE, "input_ids": [[5, 1003]]}, r"\[0, 1002\], got 1003 at position 1"),
        ({"input_ids": [[5, 1000]]}, "got 1000 at position 1.*prompt_embedding_table, which is missing"),
        ({"prompt_table_extra_ids": [[1]]}, "prompt_table_extra_ids must have one id for each of the 3"),
        (
            {"prompt_embedding_table": TABLE, "input_ids": [[1000]], "return_prompt_log_probs": True},
            "return_prompt_log_probs is true",
        ),
    ],
)
def test_invalid_prompt_tables_are_refused_by_name(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        request_of(**tensors)


def test_an_engine_without_tables_refuses_them() -> None:
    rows = make_rows(token_inputs(prompt_embedding_table=TABLE))
    with pytest.raises(Unsupported, match="prompt_embedding_table is not available"):
        convert(rows, make_context())


def test_the_largest_bfloat16_is_finite_and_the_dtype_changes_the_digest() -> None:
    assert are_finite(np.array([[0x7F7F, 0xFF7F]], np.uint16).view(BFLOAT16)), "the largest of bfloat16"
    digests = {to_prompt_table(np.zeros((2, 3), dtype), "x").digest for dtype in (np.float16, np.float32)}
    assert len(digests) == 2


def test_output_text_ignores_ids_of_table_rows() -> None:
    """Virtual tokens' ids have no text even if the tokenizer has tokens with these ids."""
    tokenizer = Tokenizer.from_dir(DEMO_MODEL)
    assert tokenizer.decode([VOCABULARY_SIZE + 1])
    (prompt,) = prompts_of(
        input_ids=[[500, 1001, 501]], prompt_embedding_table=TABLE, exclude_input_in_output=False
    )
    assert new_text(prompt, tokenizer)()._prompt_ids == (500, 501)


# ---------------------------------------------------------------------- rotary tables


def with_rotary(rotary_dim: int = 4, **tensors: Any) -> Request:
    """Return the request with the prompt 5, 6, 7 for a model that rotates `rotary_dim` dimensions."""
    limits = replace(make_limits(), rotary_dim=rotary_dim)
    rows = make_rows(token_inputs(input_ids=[[5, 6, 7]], **tensors), Vocabulary.TOKENS)
    (prompt,) = convert(rows, make_context(description=make_description(limits=limits)))
    return prompt.request


@pytest.mark.parametrize("num_positions", [3, 40])
def test_a_rotary_table_has_the_prompts_rows_and_the_offset(num_positions: int) -> None:
    """Clients of TensorRT-LLM send a row for each position that the model has."""
    numbers = np.arange(num_positions * 4, dtype=np.float32)
    table = with_rotary(
        mrope_rotary_cos_sin=numbers[None], mrope_position_deltas=np.array([[-2]], np.int64)
    ).rotary_table
    assert table is not None
    assert table.cos_sin == Matrix((3, 4), "float32", RawBuffer(numbers[:12].tobytes()))
    assert (table.delta, table.key) == (-2, table.digest)


def test_an_offset_of_zero_alone_means_no_rotary_table() -> None:
    """TensorRT-LLM's clients may send it to any model."""
    assert with_rotary(0, mrope_position_deltas=np.array([[0]], np.int64)).rotary_table is None


COS_SIN, DELTA = np.ones((1, 12), np.float32), np.array([[0]], np.int64)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"mrope_rotary_cos_sin": COS_SIN},
            "mrope_position_deltas is missing: send it with mrope_rotary_cos_sin",
        ),
        (
            {"mrope_position_deltas": DELTA + 3},
            "mrope_position_deltas is 3, but mrope_rotary_cos_sin is missing",
        ),
        (
            {"mrope_rotary_cos_sin": COS_SIN[:, :11], "mrope_position_deltas": DELTA},
            "a multiple of 4 numbers, got 11",
        ),
        (
            {"mrope_rotary_cos_sin": COS_SIN[:, :8], "mrope_position_deltas": DELTA},
            "for each of the 3 prompt tokens, got 8",
        ),
        (
            {"mrope_rotary_cos_sin": COS_SIN * np.inf, "mrope_position_deltas": DELTA},
            "must hold finite numbers",
        ),
        (
            {"mrope_rotary_cos_sin": COS_SIN, "mrope_position_deltas": DELTA - 4},
            r"must be in \[-3, \d+\] .* got -4",
        ),
    ],
)
def test_invalid_rotary_tables_are_refused(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        with_rotary(**tensors)


def test_a_model_without_multimodal_positions_refuses_a_rotary_table() -> None:
    with pytest.raises(
        Unsupported, match="mrope_rotary_cos_sin is not available: the model has no multimodal rotary"
    ):
        with_rotary(0, mrope_rotary_cos_sin=COS_SIN, mrope_position_deltas=DELTA)
