"""Replies: deltas, answers gathered into one response, and the end at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from inflight.core.request.request import FloatTensor, OutputOptions
from inflight.core.request.response import PerfMetrics, SequenceResult, TopLogProbs
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.prompt import Output
from inflight.serving.completion_text import CompletionText
from inflight.serving.reply import AS_UPSTREAM, Repetition, Reply
from inflight.text.stop_strings import StopStrings
from tests.tensors.factories import make_beams, make_prompt, make_result
from tests.triton.factories import make_reply
from tests.triton.letters import letter_tokenizer

LENGTH, STOP_WORDS, NOT_FINISHED = FinishReason.LENGTH, FinishReason.STOP_WORDS, FinishReason.NOT_FINISHED
EXCLUDE = OutputOptions(exclude_input_from_output=True)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(letter_tokenizer().encode(text))


def text_of(ids: Sequence[int]) -> str:
    return letter_tokenizer().decode(ids)


def new_text(*stop_strings: str, prompt: str = "", lead: bool = False) -> Callable[[], CompletionText]:
    strings = StopStrings(stop_strings)
    return lambda: CompletionText(letter_tokenizer(), ids_of(prompt), prompt, lead, strings)


def delta(text: str, reason: FinishReason = NOT_FINISHED, **changes: object) -> SequenceResult:
    """Return a result with a log prob for each letter: -1, -2, … by its place in the alphabet."""
    ids = ids_of(text)
    log_probs = tuple(-1.0 - token_id for token_id in ids)
    made = make_result(
        ids,
        reason,
        log_probs=(log_probs,),
        cum_log_probs=(sum(log_probs),),
        top_log_probs=(tuple(TopLogProbs((token_id,), (-0.5,)) for token_id in ids),),
        generation_logits=(FloatTensor((len(ids), 1), bytes(4 * len(ids))),),
    )
    return replace(made, **changes)


class PromptReplies:
    """The replies of one prompt, added one after another."""

    def __init__(
        self,
        new_text: Callable[[], CompletionText] | None = None,
        streaming: bool = True,
        in_one: bool = False,
        repetition: Repetition = AS_UPSTREAM,
        **request: object,
    ) -> None:
        request = {"streaming": True, "output": EXCLUDE, "input_token_ids": ids_of("ab")} | request
        prompt = make_prompt(options={"streaming": streaming}, **request)
        self.reply = Reply([(prompt, new_text)], in_one, repetition)

    def take(self, result: SequenceResult, is_last: bool | None = None) -> Output | None:
        is_last = result.is_sequence_final if is_last is None else is_last
        outputs = self.reply.add(0, result, is_last)
        return outputs[0] if outputs else None

    def outputs(self, *results: SequenceResult) -> list[tuple[str, tuple[str, ...] | None, str]]:
        """Return (ids as text, text, finish reason) of every output."""
        outputs = [output for result in results if (output := self.take(result))]
        return [
            (text_of(o.result.output_token_ids[0]), o.texts, o.result.finish_reasons[0].name) for o in outputs
        ]


def test_deltas_are_passed_on_at_once() -> None:
    its_replies = PromptReplies(new_text())
    assert its_replies.outputs(delta("c"), delta("de"), delta("", LENGTH)) == [
        ("c", ("c",), "NOT_FINISHED"),
        ("de", ("de",), "NOT_FINISHED"),
        ("", ("",), "LENGTH"),
    ]


def test_a_stream_may_repeat_its_text_so_far() -> None:
    its_replies = PromptReplies(new_text(), repetition=Repetition(text=True))
    assert its_replies.outputs(delta("c"), delta("de"), delta("", LENGTH)) == [
        ("c", ("c",), "NOT_FINISHED"),
        ("de", ("cde",), "NOT_FINISHED"),
        ("", ("cde",), "LENGTH"),
    ]
    stopped = PromptReplies(new_text("de"), repetition=Repetition(text=True))
    assert [texts for _, texts, _ in stopped.outputs(delta("c"), delta("de"), delta("x", STOP_WORDS))] == [
        ("c",), ("c",), ("c",),
    ]  # fmt: skip
    whole = PromptReplies(new_text(), streaming=False, repetition=Repetition(text=True))
    assert whole.outputs(delta("c"), delta("de", LENGTH)) == [("cde", ("cde",), "LENGTH")]
    assert PromptReplies(repetition=Repetition(text=True)).outputs(delta("c", LENGTH)) == [
        ("c", None, "LENGTH")
    ]


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert PromptReplies().outputs(delta("c", LENGTH)) == [("c", None, "LENGTH")]


def test_a_stop_string_ends_a_stream_with_the_token_that_completes_it() -> None:
    its_replies = PromptReplies(new_text("de"))
    assert its_replies.outputs(delta("c"), delta("d"), delta("efg"), delta("h"), delta("i", STOP_WORDS)) == [
        ("c", ("c",), "NOT_FINISHED"),
        ("d", ("",), "NOT_FINISHED"),
        ("e", ("",), "STOP_WORDS"),
        ("", ("",), "STOP_WORDS"),
    ]


def test_values_of_tokens_after_a_stop_string_are_cut_too() -> None:
    its_replies = PromptReplies(new_text("de"))
    output = its_replies.take(delta("cdefg"))
    assert output is not None
    result = output.result
    assert text_of(result.output_token_ids[0]) == "cde" and result.num_output_tokens == (3,)
    assert result.log_probs == ((-3.0, -4.0, -5.0),)
    assert result.cum_log_probs == (-12.0,)
    assert [top.token_ids for top in result.top_log_probs[0]] == [(2,), (3,), (4,)]
    assert result.generation_logits[0].shape == (3, 1)


def test_cum_log_prob_is_fixed_after_a_stop_string() -> None:
    """The engine's sum over tokens after the stop string does not count."""
    its_replies = PromptReplies(new_text("de"))
    its_replies.take(delta("cdefg"))
    metrics = PerfMetrics(last_token_time_ns=5)
    last = its_replies.take(delta("h", STOP_WORDS, cum_log_probs=(-99.0,), perf_metrics=metrics))
    assert last is not None
    assert last.result.cum_log_probs == (-12.0,)
    assert last.result.log_probs == ((),) and last.result.top_log_probs == ((),)
    assert last.result.perf_metrics == metrics
    assert last.result.num_output_tokens == (0,) and last.result.is_sequence_final


def test_a_stop_is_reported_once() -> None:
    its_replies = PromptReplies(new_text("d"))
    told = []
    for result in (delta("c"), delta("d"), delta("e"), delta("f", STOP_WORDS)):
        its_replies.take(result)
        told.append(its_replies.reply.has_just_stopped)
    assert told == [False, True, False, False]


def test_sequences_stop_independently() -> None:
    its_replies = PromptReplies(new_text("d"), sampling=SamplingConfig(num_return_sequences=2, top_k=5))
    told = []
    for index, text in ((0, "c"), (0, "d"), (1, "c"), (0, "e"), (1, "d")):
        its_replies.take(delta(text, sequence_index=index), is_last=False)
        told.append(its_replies.reply.has_just_stopped)
    assert told == [False, True, False, False, True]


def test_a_cancellation_after_a_stop_string_does_not_undo_it() -> None:
    its_replies = PromptReplies(new_text("d"))
    its_replies.take(delta("cd"))
    last = its_replies.take(delta("e", FinishReason.CANCELLED))
    assert last is not None and last.result.finish_reasons == (STOP_WORDS,)
    assert last.result.output_token_ids == ((),)


@pytest.mark.parametrize("in_one", [True, False], ids=["in one", "decoupled"])
@pytest.mark.parametrize("exclude", [True, False], ids=["completion", "with the prompt"])
def test_an_unstreamed_answer_is_gathered_from_engine_deltas(in_one: bool, exclude: bool) -> None:
    its_replies = PromptReplies(
        new_text("ef", prompt="ab", lead=not exclude),
        streaming=False,
        in_one=in_one,
        output=OutputOptions(exclude_input_from_output=exclude),
    )
    outputs = [
        its_replies.take(result) for result in (delta("c"), delta("de"), delta("fgh"), delta("", STOP_WORDS))
    ]
    assert outputs[:-1] == [None] * 3
    (whole,) = outputs[-1:]
    assert whole is not None
    prompt = "" if exclude else "ab"
    assert text_of(whole.result.output_token_ids[0]) == prompt + "cdef"
    assert whole.texts == (prompt + "cd",)
    assert whole.result.num_output_tokens == (4,)
    assert whole.result.finish_reasons == (STOP_WORDS,)
    assert whole.result.log_probs == ((-3.0, -4.0, -5.0, -6.0),)
    assert whole.result.generation_logits[0].shape == (4, 1)


def test_a_gathered_answer_without_stop_string_equals_that_of_the_engine() -> None:
    its_replies = PromptReplies(new_text("xyz"), streaming=False)
    assert its_replies.outputs(delta("c"), delta("dx"), delta("y", LENGTH)) == [("cdxy", ("cdxy",), "LENGTH")]


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.TIMED_OUT])
def test_a_cancelled_or_expired_gathered_answer_has_its_tokens_so_far(reason: FinishReason) -> None:
    its_replies = PromptReplies(
        new_text("xy", prompt="ab", lead=True), streaming=False, output=OutputOptions()
    )
    assert its_replies.outputs(delta("c"), delta("dx"), delta("", reason)) == [
        ("abcdx", ("abcdx",), reason.name)
    ]


def test_a_stop_string_of_one_sequence_does_not_end_another() -> None:
    """A stop string of the first sequence does not end the second one."""
    its_replies = PromptReplies(new_text("d"), sampling=SamplingConfig(num_return_sequences=2, top_k=5))
    said = its_replies.outputs(
        delta("cd", sequence_index=0),
        delta("c", sequence_index=1),
        delta("x", STOP_WORDS, sequence_index=0),
        delta("e", LENGTH, sequence_index=1),
    )
    assert [ids for ids, *_ in said] == ["cd", "c", "", "e"]
    assert [reason for *_, reason in said] == ["STOP_WORDS", "NOT_FINISHED", "STOP_WORDS", "LENGTH"]


def test_streamed_beams_have_all_tokens_each_time() -> None:
    its_replies = PromptReplies(new_text("e"), sampling=SamplingConfig(beam_width=2))
    first = make_beams(ids_of("cd"), ids_of("ce"), reason=NOT_FINISHED, is_cumulative=True)
    second = make_beams(ids_of("cfg"), ids_of("cde"), reason=LENGTH, is_cumulative=True)
    outputs = [its_replies.take(first), its_replies.take(second)]
    assert [output and output.texts for output in outputs] == [("cd", "c"), ("cfg", "cd")]
    assert outputs[1] is not None and outputs[1].result.finish_reasons == (LENGTH, STOP_WORDS)
    assert not its_replies.reply.has_just_stopped


def test_sequences_are_rows_of_one_response() -> None:
    its_replies = PromptReplies(
        new_text(), streaming=False, in_one=True, sampling=SamplingConfig(num_return_sequences=3, top_k=5)
    )
    assert its_replies.take(delta("c", LENGTH, sequence_index=2), is_last=False) is None
    assert its_replies.take(delta("de", LENGTH, sequence_index=0), is_last=False) is None
    output = its_replies.take(delta("f", FinishReason.END_ID, sequence_index=1), is_last=True)
    assert output is not None
    result = output.result
    assert [text_of(ids) for ids in result.output_token_ids] == ["de", "f", "c"]
    assert result.finish_reasons == (LENGTH, FinishReason.END_ID, LENGTH)
    assert result.num_output_tokens == (2, 1, 1)
    assert result.log_probs == ((-4.0, -5.0), (-6.0,), (-3.0,))
    assert result.cum_log_probs == (-9.0, -6.0, -3.0)
    assert [tensor.shape for tensor in result.generation_logits] == [(2, 1), (1, 1), (1, 1)]
    assert output.texts == ("de", "f", "c")


def test_cancelled_sequence_returns_its_tokens_so_far() -> None:
    its_replies = PromptReplies(
        streaming=False, in_one=True, sampling=SamplingConfig(num_return_sequences=2, top_k=5)
    )
    its_replies.take(delta("def", LENGTH, sequence_index=0), is_last=False)
    output = its_replies.take(delta("c", FinishReason.CANCELLED, sequence_index=1), is_last=True)
    assert output is not None
    assert output.result.output_token_ids == (ids_of("def"), ids_of("c"))
    assert output.result.log_probs == ((-4.0, -5.0, -6.0), (-3.0,))
    assert output.result.cum_log_probs == (-15.0, -3.0)
    assert [tensor.shape[0] for tensor in output.result.generation_logits] == [3, 1]


def test_a_batch_in_one_response_keeps_the_order_of_its_prompts() -> None:
    reply = make_reply(make_prompt(), make_prompt(), make_prompt(), in_one=True)
    assert reply.add(2, delta("c", LENGTH), is_last=False) == ()
    assert reply.add(0, delta("a", LENGTH), is_last=False) == ()
    outputs = reply.add(1, delta("b", LENGTH), is_last=True)
    assert [output.batch_index for output in outputs] == [0, 1, 2]
    assert [text_of(output.result.output_token_ids[0]) for output in outputs] == ["a", "b", "c"]


def test_separate_responses_of_a_batch_have_batch_indices() -> None:
    reply = make_reply(make_prompt(), make_prompt())
    (output,) = reply.add(1, delta("b", LENGTH), is_last=False)
    assert output.batch_index == 1


# ---------------------------------------------------------------- values that a stream repeats

WITH_CONTEXT_OUTPUTS = OutputOptions(
    return_log_probs=True, return_prompt_log_probs=True, return_context_logits=True
)
PROMPT_LOGITS = FloatTensor((2, 1), bytes(8))


def streamed(*results: SequenceResult, repetition: Repetition = AS_UPSTREAM) -> list[SequenceResult]:
    """Return the stream of one prompt with all outputs, for these results of the engine."""
    its_replies = PromptReplies(new_text("xyz"), output=WITH_CONTEXT_OUTPUTS, repetition=repetition)
    first, *others = results
    first = replace(first, context_logits=PROMPT_LOGITS, prompt_log_probs=(0.0, -1.0))
    outputs = [its_replies.take(result) for result in (first, *others)]
    return [output.result for output in outputs if output]


def test_every_response_of_a_stream_repeats_context_outputs() -> None:
    results = streamed(delta("c"), delta("d"), delta("", LENGTH))
    assert [result.context_logits for result in results] == [PROMPT_LOGITS] * 3
    assert [result.prompt_log_probs for result in results] == [(0.0, -1.0)] * 3


def test_large_context_logits_are_in_the_first_response_only() -> None:
    for max_bytes, count in ((8, 2), (7, 1)):
        results = streamed(delta("c"), delta("d", LENGTH), repetition=Repetition(max_bytes=max_bytes))
        assert [result.context_logits for result in results if result.context_logits] == [
            PROMPT_LOGITS
        ] * count


def test_every_response_of_a_stream_has_the_log_probs_of_all_tokens_so_far() -> None:
    results = streamed(delta("c"), delta("de"), delta("", LENGTH))
    assert [result.log_probs for result in results] == [
        ((-3.0,),),
        ((-3.0, -4.0, -5.0),),
        ((-3.0, -4.0, -5.0),),
    ]
    assert [len(result.top_log_probs[0]) for result in results] == [1, 2, 0]


def test_a_response_may_have_only_its_own_log_probs() -> None:
    results = streamed(delta("c"), delta("de"), delta("", LENGTH), repetition=Repetition(log_probs=False))
    assert [result.log_probs for result in results] == [((-3.0,),), ((-4.0, -5.0),), ((),)]


def test_a_stream_ended_by_a_stop_string_repeats_context_outputs() -> None:
    results = streamed(delta("cx"), delta("yze"), delta("f", STOP_WORDS))
    assert [text_of(result.output_token_ids[0]) for result in results] == ["cx", "yz", ""]
    assert results[-1].log_probs == ((-3.0, -24.0, -25.0, -26.0),)
    assert results[-1].context_logits == PROMPT_LOGITS
    assert results[-1].generation_logits == (FloatTensor((0, 0), b""),)


def test_each_sequence_of_a_stream_repeats_its_own_log_probs() -> None:
    its_replies = PromptReplies(
        new_text(), output=WITH_CONTEXT_OUTPUTS, sampling=SamplingConfig(num_return_sequences=2, top_k=5)
    )
    texts = (("c", 0), ("d", 1), ("e", 0), ("f", 1))
    outputs = [its_replies.take(delta(text, sequence_index=index), is_last=False) for text, index in texts]
    log_probs = [output.result.log_probs for output in outputs if output]
    assert log_probs == [((-3.0,),), ((-4.0,),), ((-3.0, -5.0),), ((-4.0, -6.0),)]


def test_streamed_beams_need_no_repetition() -> None:
    its_replies = PromptReplies(
        new_text(), output=WITH_CONTEXT_OUTPUTS, sampling=SamplingConfig(beam_width=2)
    )
    said = {"is_cumulative": True, "log_probs": ((-3.0,), (-4.0,))}
    beams = make_beams(ids_of("c"), ids_of("d"), reason=NOT_FINISHED, **said)
    results = [output.result for _ in range(2) if (output := its_replies.take(beams))]
    assert [result.log_probs for result in results] == [((-3.0,), (-4.0,))] * 2


def test_a_client_that_does_not_stream_gets_context_logits_once() -> None:
    its_replies = PromptReplies(new_text("xyz"), streaming=False, output=WITH_CONTEXT_OUTPUTS)
    assert its_replies.take(delta("c", context_logits=PROMPT_LOGITS)) is None
    output = its_replies.take(delta("d", LENGTH))
    assert output is not None and output.result.log_probs == ((-3.0, -4.0),)
    assert output.result.context_logits == PROMPT_LOGITS
