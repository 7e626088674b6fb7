"""Every row of the table: its effect on a request, or that only its neutral values are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from inflight.core.kv.retention import Retention, TokenRangeRetention
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import ExternalDraft, FloatTensor, OutputOptions, Request
from inflight.core.request.sampling_config import CONTROLS
from inflight.errors import Unsupported
from inflight.prompt import ReplyOptions
from inflight.tensors.input_table import INPUTS
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.reader import NUMPY_TYPES
from inflight.tensors.requests import ServingContext, convert
from inflight.tensors.spec import NeutralRule, TensorSpec, Vocabulary
from inflight.tensors.wanted_outputs import Naming
from tests.tensors.factories import make_context, make_rows, text_inputs, token_inputs, wire

UNBUILT = [spec for spec in INPUTS.specs if not spec.built]
BUILT = {spec.name for spec in INPUTS.specs if spec.built}
VOCABULARY_SIZE = 1000


class Codes:
    """A TextEncoder: letters become their code points; words also have a spelling with a leading space."""

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        return [[len(text)] for text in texts]

    def max_bytes_per_token(self) -> None:
        return None

    def tokens(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        return (tuple(map(ord, word)), (32, *map(ord, word)))


def converted(
    vocabulary: Vocabulary = Vocabulary.TOKENS,
    outputs: frozenset[str] | None = None,
    context: ServingContext | None = None,
    **tensors: object,
) -> tuple[Request, ReplyOptions]:
    inputs = token_inputs(**tensors) if vocabulary is Vocabulary.TOKENS else text_inputs(**tensors)
    every = {name for name, _ in OUTPUTS.declared(vocabulary)}
    naming = Naming.from_triton(frozenset(every) if outputs is None else outputs, vocabulary)
    (prompt,) = convert(
        make_rows(inputs, vocabulary), replace(context or make_context(), naming=naming, encoder=Codes())
    )
    return prompt.request, prompt.options


# The specification's tables, name for name: (data type, rank with the batch dimension).
SPECIFIED_INPUTS = {
    "request_output_len": ("INT32", 2),
    "input_ids": ("INT32", 2),
    "streaming": ("BOOL", 2),
    "beam_width": ("INT32", 2),
    "temperature": ("FP32", 2),
    "runtime_top_k": ("INT32", 2),
    "runtime_top_p": ("FP32", 2),
    "len_penalty": ("FP32", 2),
    "early_stopping": ("INT32", 2),
    "repetition_penalty": ("FP32", 2),
    "min_length": ("INT32", 2),
    "presence_penalty": ("FP32", 2),
    "frequency_penalty": ("FP32", 2),
    "no_repeat_ngram_size": ("INT32", 2),
    "random_seed": ("UINT64", 2),
    "end_id": ("INT32", 2),
    "pad_id": ("INT32", 2),
    "embedding_bias": ("FP32", 2),
    "bad_words_list": ("INT32", 3),
    "stop_words_list": ("INT32", 3),
    "prompt_embedding_table": ("FP16", 3),
    "prompt_vocab_size": ("INT32", 2),
    "lora_task_id": ("UINT64", 2),
    "lora_weights": ("FP16", 3),
    "lora_config": ("INT32", 3),
    "return_log_probs": ("BOOL", 2),
    "return_context_logits": ("BOOL", 2),
    "return_generation_logits": ("BOOL", 2),
    "draft_input_ids": ("INT32", 2),
    "draft_logits": ("FP32", 3),
}
SPECIFIED_OUTPUTS = {
    "output_ids": ("INT32", 3),
    "sequence_length": ("INT32", 2),
    "output_log_probs": ("FP32", 3),
    "cum_log_probs": ("FP32", 2),
    "context_logits": ("FP32", 3),
    "generation_logits": ("FP32", 4),
}


@pytest.mark.parametrize("name", SPECIFIED_INPUTS)
def test_every_specified_input_is_in_the_table(name: str) -> None:
    spec = INPUTS[name]
    assert (spec.dtype, max(len(spec.dims), 1) + 1) == SPECIFIED_INPUTS[name]


@pytest.mark.parametrize("name", SPECIFIED_OUTPUTS)
def test_every_specified_output_is_in_the_table(name: str) -> None:
    assert (OUTPUTS[name].dtype, len(OUTPUTS[name].dims) + 1) == SPECIFIED_OUTPUTS[name]


@pytest.mark.parametrize("vocabulary", Vocabulary)
def test_names_are_distinct(vocabulary: Vocabulary) -> None:
    for table in (INPUTS, OUTPUTS):
        names = [name for name, _ in table.declared(vocabulary)]
        assert len(names) == len(set(names))


def test_data_types_are_known() -> None:
    assert {spec.dtype for spec in (*INPUTS.specs, *OUTPUTS.specs)} <= set(NUMPY_TYPES)


@pytest.mark.parametrize("spec", UNBUILT, ids=lambda spec: spec.name)
def test_unsupported_tensors_are_accepted_at_their_neutral_values(spec: TensorSpec) -> None:
    for vocabulary in Vocabulary:
        plain = converted(vocabulary)
        for value in neutral_values(spec):
            for name in spec.names(vocabulary):
                assert converted(vocabulary, **{name: value}) == plain


def test_decoder_input_ids_with_only_the_pad_id_are_ignored() -> None:
    plain = converted(pad_id=7)
    assert converted(pad_id=7, decoder_input_ids=[[7]], decoder_input_lengths=1) == plain
    for pad_id, ids in ((7, [[8]]), (7, [[7, 7]]), (None, [[7]])):
        with pytest.raises(Unsupported, match=r"^decoder_input_ids is not .*or the pad_id alone$"):
            converted(pad_id=pad_id, decoder_input_ids=ids)


@pytest.mark.parametrize("value", [0, 1])
def test_early_stopping_may_be_declared_as_bool(value: int) -> None:
    sampling = converted(early_stopping=np.array([bool(value)]))[0].sampling
    assert sampling.early_stopping == value and type(sampling.early_stopping) is int


def test_draft_logits_may_be_declared_as_fp16() -> None:
    sent = {"draft_input_ids": [[1, 2]], "draft_logits": DRAFT_LOGITS.astype(np.float16)}
    assert field_value(converted(**sent), "draft.logits") == FloatTensor(
        (2, VOCABULARY_SIZE), DRAFT_LOGITS.tobytes()
    )


def test_a_tensor_that_another_config_pbtxt_declares_is_refused() -> None:
    with pytest.raises(
        Unsupported, match=r"^xyzzy is declared in config\.pbtxt, but this model does not know it"
    ):
        converted(xyzzy=np.zeros([1, 1], np.int32))


@pytest.mark.parametrize("spec", UNBUILT, ids=lambda spec: spec.name)
def test_unsupported_tensors_are_refused_at_any_other_value(spec: TensorSpec) -> None:
    for vocabulary in Vocabulary:
        for name in spec.names(vocabulary):
            value = wire(spec, b"x" if spec.dtype == "BYTES" else 7)
            with pytest.raises(Unsupported, match=rf"^{name} is not available .*expected it left out"):
                converted(vocabulary, **{name: value})


def neutral_values(spec: TensorSpec) -> list[np.ndarray]:
    assert spec.neutral is not None
    empty = np.zeros([1, 0], dtype=NUMPY_TYPES[spec.dtype])
    if spec.neutral.rule is NeutralRule.VALUES:
        return [empty, *(wire(spec, value) for value in spec.neutral.values)]
    if spec.neutral.rule is NeutralRule.NO_TEXT:
        return [empty, wire(spec, b"")]
    return [empty]


def test_messages_give_neutral_values_as_clients_send_them() -> None:
    assert str(INPUTS["lookahead_window_size"].neutral) == "0"
    assert str(INPUTS["encoder_input_features"].neutral) == "an empty tensor"
    assert str(INPUTS["decoder_text_input"].neutral) == '""'


@pytest.mark.parametrize("name", ["embedding_bias_words", "embedding_bias_weights", "prompt_table_extra_id"])
def test_the_ensembles_own_tensors_are_in_the_table(name: str) -> None:
    assert INPUTS.sent_as(name, Vocabulary.TEXT) is not None


def bias(values: dict[int, float]) -> FloatTensor:
    array = np.zeros(VOCABULARY_SIZE, np.float32)
    for token_id, value in values.items():
        array[token_id] = value
    return FloatTensor((VOCABULARY_SIZE,), array.tobytes())


WORDS = np.array([[[5, 7, 3, 9, 2], [3, 5, -1, -1, -1]]], np.int32)
SPECIFIED_WORDS = ((5, 7, 3), (9, 2))
BIAS = np.frombuffer(bias({7: 2.0}).data, np.float32).reshape(1, -1)
DRAFT_LOGITS = np.ones([1, 2, VOCABULARY_SIZE], np.float32)

# (name, value, field that it sets, the field's value)
FIELDS_SET = [
    ("input_ids", [[1, 2]], "input_token_ids", (1, 2)),
    ("input_lengths", 2, "input_token_ids", (5, 6)),
    ("request_output_len", 9, "max_new_tokens", 9),
    ("streaming", True, "streaming", True),
    ("end_id", 4, "end_ids", (4,)),
    ("pad_id", 0, "pad_id", 0),
    ("stop_words_list", WORDS, "stop_words", SPECIFIED_WORDS),
    ("bad_words_list", WORDS, "bad_words", SPECIFIED_WORDS),
    ("stop_words", [[b"ab", b""]], "stop_strings", ("ab",)),
    ("bad_words", [[b"ab", b""]], "bad_words", ((97, 98), (32, 97, 98))),
    ("embedding_bias", BIAS, "embedding_bias", bias({7: 2.0})),
    *(
        (
            control.tensor,
            [control.example] if isinstance(control.example, tuple) else control.example,
            f"sampling.{name}",
            control.example,
        )
        for name, control in CONTROLS.items()
        if not name.startswith("logit_bias")
    ),
    ("seed", 11, "sampling.random_seed", 11),
    ("min_tokens", 2, "sampling.min_length", 2),
    ("exclude_input_in_output", True, "output.exclude_input_from_output", True),
    ("return_log_probs", True, "output.return_log_probs", True),
    ("num_top_log_probs", 5, "output.num_top_log_probs", 5),
    ("return_prompt_log_probs", True, "output.return_prompt_log_probs", True),
    ("return_context_logits", True, "output.return_context_logits", True),
    ("return_generation_logits", True, "output.return_generation_logits", True),
    ("return_perf_metrics", True, "output.return_perf_metrics", True),
    ("return_receipt", True, "output.return_receipt", True),
    ("return_kv_cache_reuse_stats", True, "output.return_perf_metrics", True),
    ("draft_input_ids", [[1, 2]], "draft", ExternalDraft((1, 2))),
    ("prompt_lookup_num_tokens", 3, "prompt_lookup_num_tokens", 3),
    ("logits_post_processor_name", b"upper", "logits_post_processor_name", "upper"),
    ("retention_decode_priority", 80, "retention.decode", Retention(80, None)),
    ("retention_decode_duration_ms", 500, "retention.decode", Retention(35, 500)),
    ("cache_salt_id", 2**64 - 1, "identity.cache_salt_id", 2**64 - 1),
    ("priority", 0.75, "priority", 0.75),
    ("client_id", 2**64 - 1, "client_id", 2**64 - 1),
    ("allotted_time_ms", 9, "allotted_time_ms", 9),
]
PROMPT_TABLES = {
    "prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_ids", "prompt_table_extra_id",
    "mrope_rotary_cos_sin", "mrope_position_deltas",
}  # fmt: skip
ALIASES = {"seed", "min_tokens", "return_kv_cache_reuse_stats"}

PARTS = ("starts", "ends", "priorities", "durations_ms")
RANGES = {
    f"retention_token_range_{part}": [values]
    for part, values in zip(PARTS, ([0, 2], [2, -1], [90, 0], [1000, -1]), strict=True)
}
READ_RANGES = (
    TokenRangeRetention(0, 2, Retention(90, 1000)),
    TokenRangeRetention(2, None, Retention(0, None)),
)

LOGIT_BIAS = {"logit_bias_ids": [[4, 9]], "logit_bias_values": [[1.5, -np.inf]]}

GUIDE = {"guided_decoding_guide_type": b"regex", "guided_decoding_guide": b"a+"}

# Tensors that have an effect only with others: (name, tensors, field that they set, the field's value).
COMPANIONS = [
    (
        "embedding_bias_words",
        {"embedding_bias_words": [[b"aba", b""]], "embedding_bias_weights": [[2.0, 5.0]]},
        "embedding_bias",
        bias({97: 4.0, 98: 2.0}),
    ),
    (
        "embedding_bias_weights",
        {
            "embedding_bias": BIAS,
            "embedding_bias_words": [[b"a", b"ab"]],
            "embedding_bias_weights": [[2.0, -0.5]],
        },
        "embedding_bias",
        bias({7: 2.0, 97: 1.5, 98: -0.5}),
    ),
    ("logit_bias_ids", LOGIT_BIAS, "sampling.logit_bias_ids", (4, 9)),
    ("logit_bias_values", LOGIT_BIAS, "sampling.logit_bias_values", (1.5, -np.inf)),
    (
        "draft_logits",
        {"draft_input_ids": [[1, 2]], "draft_logits": DRAFT_LOGITS},
        "draft.logits",
        FloatTensor((2, VOCABULARY_SIZE), DRAFT_LOGITS.tobytes()),
    ),
    (
        "draft_acceptance_threshold",
        {"draft_input_ids": [[1, 2]], "draft_acceptance_threshold": 0.5},
        "draft.acceptance_threshold",
        0.5,
    ),
    *[(f"retention_token_range_{part}", RANGES, "retention.ranges", READ_RANGES) for part in PARTS],
    ("guided_decoding_guide_type", GUIDE, "guide", Guide(GuideKind.REGEX, "a+")),
    ("guided_decoding_guide", GUIDE, "guide.text", "a+"),
]
# Tensors that only request an output.
ASKING = {
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_cumulative_logprob",
    "return_finish_reason",
}


def field_value(pair: tuple[Request, ReplyOptions], path: str) -> object:
    value: object = pair[0] if hasattr(pair[0], path.split(".")[0]) else pair[1]
    for part in path.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("name", "value", "path", "expected"), FIELDS_SET, ids=lambda part: str(part))
def test_each_tensor_sets_its_field_of_the_request(
    name: str, value: object, path: str, expected: object
) -> None:
    assert field_value(converted(), path) != expected
    assert field_value(converted(**{name: value}), path) == expected


def test_text_input_becomes_prompt_ids_and_prompt_text() -> None:
    request, options = converted(input_ids=None, text_input=b"four")
    assert (request.input_token_ids, options.prompt_text) == ((4,), "four")


@pytest.mark.parametrize(
    ("name", "tensors", "path", "expected"),
    COMPANIONS,
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_tensors_that_need_others_set_their_field_of_the_request(
    name: str, tensors: dict[str, object], path: str, expected: object
) -> None:
    assert name in tensors
    assert field_value(converted(**tensors), path) == expected


def test_every_built_input_is_covered_above() -> None:
    covered = {name for name, *_ in FIELDS_SET} - ALIASES | {name for name, *_ in COMPANIONS} | ASKING
    # test_additional_outputs.py, test_prompt_tables.py, test_lora.py
    elsewhere = {"additional_outputs"} | PROMPT_TABLES
    elsewhere |= {name for name in BUILT if name.startswith("lora_")}
    elsewhere |= {name for name in BUILT if name.startswith("image_")}  # test_pictures.py
    elsewhere |= {"num_draft_tokens", "use_draft_logits"}  # test_bls.py
    assert covered | elsewhere | {"text_input", "stop", "state"} == BUILT  # test_request_kind.py


FIELDS_SET_BY_TEXT = [
    ("max_tokens", 9, "max_new_tokens", 9),
    ("stream", True, "streaming", True),
    ("end_id", 4, "end_ids", (4,)),
    ("top_k", 3, "sampling.top_k", 3),
    ("top_p", 0.5, "sampling.top_p", 0.5),
    ("top_p_min", 0.25, "sampling.top_p_min", 0.25),
    ("top_p_decay", 0.5, "sampling.top_p_decay", 0.5),
    ("top_p_reset_ids", 8, "sampling.top_p_reset_id", 8),
    ("temperature", 0.5, "sampling.temperature", 0.5),
    ("seed", 11, "sampling.random_seed", 11),
    ("random_seed", 11, "sampling.random_seed", 11),
    ("min_tokens", 3, "sampling.min_length", 3),
    ("min_length", 3, "sampling.min_length", 3),
    ("length_penalty", 0.5, "sampling.length_penalty", 0.5),
    ("exclude_input_in_output", True, "include_prompt", False),
    # The names of TensorRT-LLM's llmapi model.
    ("streaming", True, "streaming", True),
    ("sampling_param_max_tokens", 9, "max_new_tokens", 9),
    ("sampling_param_temperature", 0.5, "sampling.temperature", 0.5),
    ("sampling_param_top_k", 3, "sampling.top_k", 3),
    ("sampling_param_top_p", 0.5, "sampling.top_p", 0.5),
    ("sampling_param_frequency_penalty", 0.5, "sampling.frequency_penalty", 0.5),
    ("sampling_param_presence_penalty", 0.5, "sampling.presence_penalty", 0.5),
    ("sampling_param_stop", [[b"ab", b"c"]], "stop_strings", ("ab", "c")),
    ("sampling_param_seed", 11, "sampling.random_seed", 11),
    ("sampling_param_exclude_input_from_output", True, "include_prompt", False),
    ("sampling_param_return_perf_metrics", True, "output.return_perf_metrics", True),
    ("return_cumulative_logprob", True, "output.return_log_probs", True),
    ("return_finish_reason", False, "outputs", frozenset({"text_output"})),
]


@pytest.mark.parametrize(
    ("name", "value", "path", "expected"), FIELDS_SET_BY_TEXT, ids=lambda part: str(part)
)
def test_each_tensor_of_ensemble_sets_its_field_of_the_request(
    name: str, value: object, path: str, expected: object
) -> None:
    assert field_value(converted(Vocabulary.TEXT), path) != expected
    given = {"max_tokens": None} if name == "sampling_param_max_tokens" else {}
    assert field_value(converted(Vocabulary.TEXT, **given, **{name: value}), path) == expected


def test_llmapis_best_of_must_be_at_most_one() -> None:
    assert converted(Vocabulary.TEXT, sampling_param_best_of=1) == converted(Vocabulary.TEXT)
    with pytest.raises(Unsupported, match=r"^sampling_param_best_of is not available .*got 2, .* 0 or 1$"):
        converted(Vocabulary.TEXT, sampling_param_best_of=2)


def test_most_built_inputs_have_one_name_in_both_vocabularies() -> None:
    """All other inputs are the renamed tensors above, or tensors that only make sense for ids."""
    renamed = {spec.name for spec in INPUTS.specs if spec.built and spec.name not in spec.text_names}
    assert renamed == {
        "request_output_len",
        "runtime_top_k",
        "runtime_top_p",
        "runtime_top_p_min",
        "runtime_top_p_decay",
        "runtime_top_p_reset_ids",
        "len_penalty",
        "input_ids",
        "input_lengths",
        "mrope_rotary_cos_sin",
        "mrope_position_deltas",
        "stop_words_list",
        "bad_words_list",
        "embedding_bias",
        "draft_input_ids",
        "draft_logits",
        "draft_acceptance_threshold",
        "prompt_table_extra_ids",
    }


ASKED_FOR = [spec for spec in OUTPUTS.specs if spec.asked_by]
# Outputs that are returned without being requested, if there is a value.
SENT_BY_DEFAULT = {"output_ids", "sequence_length", "text_output", "finish_reason"}
DISTINGUISHING = {"batch_index", "sequence_index"}


def test_every_output_is_requested_or_default_or_distinguishes_responses() -> None:
    assert {spec.name for spec in ASKED_FOR} | SENT_BY_DEFAULT | DISTINGUISHING == {
        spec.name for spec in OUTPUTS.specs if spec.built
    }
    assert converted()[1].outputs == SENT_BY_DEFAULT


def vocabulary_of(spec: TensorSpec) -> Vocabulary:
    return Vocabulary.TEXT if spec.text_only else Vocabulary.TOKENS


def asking_value(spec: TensorSpec) -> object:
    return {"num_top_log_probs": 3, "lora_command": b"{}"}.get(spec.asked_by, True)


@pytest.mark.parametrize("spec", ASKED_FOR, ids=lambda spec: spec.name)
def test_a_flag_asks_for_its_outputs(spec: TensorSpec) -> None:
    vocabulary = vocabulary_of(spec)
    value = asking_value(spec)
    asked = {other.name for other in ASKED_FOR if other.asked_by == spec.asked_by}
    unasked = SENT_BY_DEFAULT & {name for name, _ in OUTPUTS.declared(vocabulary)}
    assert converted(vocabulary, **{spec.asked_by: value})[1].outputs == unasked | asked


@pytest.mark.parametrize("spec", OUTPUTS.specs, ids=lambda spec: spec.name)
def test_an_output_is_returned_by_its_flag_and_not_by_its_name(spec: TensorSpec) -> None:
    """A Triton ensemble names every output that it passes on: without the flag nothing is computed for it."""
    vocabulary, named = vocabulary_of(spec), frozenset({spec.name})
    for unset in ({}, {spec.asked_by: type(asking_value(spec))()}) if spec.asked_by else ():
        request, options = converted(vocabulary, outputs=named, **unset)
        assert (options.outputs, options.named) == (frozenset(), named)
        assert replace(request.output, exclude_input_from_output=False) == OutputOptions()
    asking = {spec.asked_by: asking_value(spec)} if spec.asked_by else {}
    request, options = converted(vocabulary, outputs=named, **asking)
    assert options.outputs == (named if spec.built else frozenset())
    by_flag, _ = converted(vocabulary, **asking)
    asked, flagged = (replace(each.output, exclude_input_from_output=False) for each in (request, by_flag))
    assert asked == flagged


def test_an_unwanted_finish_reason_is_left_out_even_if_named() -> None:
    _, options = converted(Vocabulary.TEXT, outputs=frozenset({"finish_reason"}), return_finish_reason=False)
    assert not options.outputs


@pytest.mark.parametrize("spec", ASKED_FOR, ids=lambda spec: spec.name)
def test_a_flag_has_no_effect_if_only_other_outputs_are_named(spec: TensorSpec) -> None:
    value = asking_value(spec)
    vocabulary, nobody = vocabulary_of(spec), frozenset({"finish_reason"})
    request, options = converted(vocabulary, outputs=nobody, **{spec.asked_by: value})
    assert options.outputs == nobody
    assert request.output == converted(vocabulary, outputs=nobody)[0].output


def test_naming_all_declared_outputs_counts_as_naming_none() -> None:
    """Logits that tensorrtllm_backend's config.pbtxt declares are then not computed for every request."""
    declared = ["output_ids", "sequence_length", "context_logits", "a_newer_one"]
    naming = Naming.from_triton(frozenset(declared), Vocabulary.TOKENS, declared)
    (prompt,) = convert(make_rows(token_inputs()), make_context(naming=naming, encoder=Codes()))
    assert prompt.options.outputs == {"output_ids", "sequence_length"}
    assert not prompt.request.output.return_context_logits


def test_the_client_sets_the_number_of_top_log_probs() -> None:
    named = converted(outputs=frozenset({"top_log_probs"}), num_top_log_probs=7)[0]
    assert named.output.num_top_log_probs == 7


def test_separate_responses_of_sequences_have_a_sequence_index() -> None:
    several = {"num_return_sequences": 2, "runtime_top_k": 4}
    assert "sequence_index" in converted(**several)[1].outputs
    assert "sequence_index" not in converted(beam_width=2, num_return_sequences=2)[1].outputs
    assert "sequence_index" not in converted(context=make_context(decoupled=False), **several)[1].outputs
