"""Texts of completions: loading of the tokenizer, parts of text_output, and the cut at a stop string."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inflight.core.request.request import FloatTensor
from inflight.core.request.response import SequenceResult, TopLogProbs
from inflight.core.request.stop import FinishReason
from inflight.errors import Unsupported
from inflight.serving.completion_text import CompletionText, TextDelta, TokenizerFinder, cut_at_stop
from inflight.text.stop_strings import StopStrings
from inflight.text.tokenizer import Tokenizer
from tests.tensors.factories import make_beams, make_result
from tests.text.tiny_tokenizers import NAMES, byte_ids, tokenizer
from tests.triton.letters import letter_tokenizer, save_letter_tokenizer


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(letter_tokenizer().encode(text))


def make_text(
    prompt: str = "ab", prompt_text: str | None = None, lead: bool = False, stops: tuple[str, ...] = ()
) -> CompletionText:
    return CompletionText(letter_tokenizer(), ids_of(prompt), prompt_text, lead, StopStrings(stops))


def final(text: str, **changes: object) -> SequenceResult:
    return make_result(ids_of(text), FinishReason.LENGTH, **changes)


def only_text(text: CompletionText, result: SequenceResult) -> str:
    (delta,) = text.add(result)
    return delta.text


# -------------------------------------------------------------------- without stop strings


def test_text_starts_with_the_given_prompt() -> None:
    assert only_text(make_text("ab", prompt_text="AB!", lead=True), final("cd")) == "AB!cd"


def test_text_starts_with_the_decoded_prompt_ids() -> None:
    assert only_text(make_text("ab", lead=True), final("cd")) == "abcd"


def test_without_the_prompt_text_is_only_generated_text() -> None:
    assert only_text(make_text(), final("cd")) == "cd"


def test_prompt_ids_in_the_output_are_not_in_the_text() -> None:
    assert only_text(make_text(lead=True), final("abcd", num_output_tokens=(2,))) == "abcd"


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.TIMED_OUT])
def test_a_cancelled_or_expired_request_has_its_text_so_far(reason: FinishReason) -> None:
    assert only_text(make_text(lead=True), make_result(ids_of("cd"), reason)) == "abcd"
    assert only_text(make_text(lead=True), make_result((), reason)) == "ab"
    assert only_text(make_text(), make_result((), reason)) == ""


def test_a_result_without_tokens_is_the_empty_text_or_the_prompt() -> None:
    result = make_result(ids_of("ab"), FinishReason.END_ID, num_output_tokens=(0,))
    assert only_text(make_text(), result) == ""
    assert only_text(make_text(lead=True), result) == "ab"


def test_deltas_join_to_the_whole_text() -> None:
    text = make_text()
    results = [make_result(ids_of("c")), make_result(ids_of("de")), make_result((), FinishReason.LENGTH)]
    assert [only_text(text, result) for result in results] == ["c", "de", ""]


# -------------------------------------------------------------------- with stop strings


def test_text_ends_before_the_stop_string_and_tokens_with_it() -> None:
    text = make_text(stops=("de",))
    assert text.add(make_result(ids_of("bc"))) == (TextDelta("bc", 2),)
    assert text.add(make_result(ids_of("cd"))) == (TextDelta("c", 2),)  # "d" may begin it
    assert text.add(make_result(ids_of("efg"))) == (TextDelta("", 1, stop_string="de"),)
    assert text.add(final("h")) == (TextDelta("", 0, stop_string="de"),)


def test_a_possible_beginning_of_a_stop_string_is_released_by_the_last_result() -> None:
    text = make_text(stops=("xyz",))
    assert text.add(make_result(ids_of("axy"))) == (TextDelta("a", 3),)
    assert text.add(final("")) == (TextDelta("xy", 0),)


@pytest.mark.parametrize("lead", [False, True])
def test_a_stop_string_in_the_prompt_is_ignored(lead: bool) -> None:
    text = make_text("xdd", lead=lead, stops=("xd", "de"))
    result = final("xddefx", num_output_tokens=(3,))  # "de" spans prompt and output
    assert text.add(result) == (TextDelta("xddefx" if lead else "efx", 3),)


def test_one_whole_result_is_cut_like_a_stream() -> None:
    text = make_text("ab", lead=True, stops=("de",))
    (delta,) = text.add(final("abcdefg", num_output_tokens=(5,)))
    assert delta == TextDelta("abc", 3, stop_string="de")


def test_every_beam_has_a_text_and_an_end_of_its_own() -> None:
    text = make_text(stops=("de",))
    beams = make_beams(ids_of("cdef"), ids_of("cdd"), reason=FinishReason.LENGTH)
    assert text.add(beams) == (TextDelta("c", 3, stop_string="de"), TextDelta("cdd", 3))


def test_streamed_beams_have_all_text_so_far_without_stop_strings() -> None:
    text = make_text(stops=("de",))
    unfinished = FinishReason.NOT_FINISHED
    first = make_beams(ids_of("cd"), ids_of("cc"), reason=unfinished, is_cumulative=True)
    assert [delta.text for delta in text.add(first)] == ["c", "cc"]
    last = make_beams(ids_of("ccd"), ids_of("cde"), is_cumulative=True)
    assert text.add(last) == (TextDelta("ccd", 3), TextDelta("c", 2 + 1, stop_string="de"))


def test_a_single_streamed_beam_has_all_text_so_far() -> None:
    text = make_text()
    for so_far in ("c", "cd"):
        assert only_text(text, make_result(ids_of(so_far), is_cumulative=True)) == so_far


# Parts of stop strings, bytes that form characters only together, and an invalid byte.
TOKENIZERS = ["byte_level", "llama", "gemma"]
DATA = st.lists(st.sampled_from([b"a", b"ab", b"b", b" ", "🎉".encode(), "é".encode(), b"\xff"]), max_size=14)
STOPS = st.lists(st.sampled_from(["a", "ab", "aab", "ba", "b a", "🎉", "é", "🎉a", "\ufffd"]), max_size=4)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)  # the first example trains the tokenizer
@given(DATA, STOPS, st.lists(st.integers(0, 5), max_size=8))
@example([b"a", "🎉".encode(), b"b"], ["🎉"], [3])
@example([b"a", b"\xff"], ["\ufffd"], [])
def test_text_and_tokens_do_not_depend_on_how_results_are_divided(
    name: str, data: list[bytes], stops: list[str], sizes: list[int]
) -> None:
    ids = tuple(byte_ids(name, b"".join(data)))
    alone = outcome(name, ids, stops, [])
    assert outcome(name, ids, stops, sizes) == alone
    assert outcome(name, ids, stops, [len(ids)]) == alone

    text, kept, stopped = alone
    decoded = tokenizer(name).decode(tokenizer(name).encode("the") + list(ids))[len("the") :]
    assert decoded.startswith(text)
    assert not any(stop in text for stop in stops)
    if stopped:
        # All kept tokens are needed: without the last one there is no stop string yet.
        assert not outcome(name, kept[:-1], stops, [], is_final=False)[2]
    else:
        assert (text, kept) == (decoded, ids)


def outcome(
    name: str, ids: tuple[int, ...], stops: list[str], sizes: list[int], is_final: bool = True
) -> tuple[str, tuple[int, ...], bool]:
    """Return text, kept ids and whether a stop string ended them, for ids in portions of these sizes."""
    prompt = tuple(tokenizer(name).encode("the"))
    text = CompletionText(tokenizer(name), prompt, stop_strings=StopStrings(stops))
    shown, kept, stopped, position = "", (), False, 0
    for size in [*sizes, *[1] * len(ids), 0]:
        part = ids[position : position + size]
        position += size
        last = position >= len(ids) and is_final
        result = make_result(part, FinishReason.LENGTH if last else FinishReason.NOT_FINISHED)
        (delta,) = text.add(result)
        shown, stopped = shown + delta.text, delta.stopped
        kept += cut_at_stop(result, (delta,)).output_token_ids[0]
        if last:
            break
    return shown, kept, stopped


# -------------------------------------------------------------------- cutting a result


def detailed(*tokens: int) -> SequenceResult:
    """Return a result with every output, the prompt's ids included."""
    count = len(tokens)
    log_probs = tuple(-0.5 * (i + 1) for i in range(count))
    return make_result(
        (7, 7, *tokens),
        FinishReason.LENGTH,
        num_output_tokens=(count,),
        log_probs=(log_probs,),
        cum_log_probs=(-3.0 + sum(log_probs),),
        top_log_probs=(tuple(TopLogProbs((i,), (-0.1,)) for i in range(count)),),
        prompt_log_probs=(0.0, -1.0),
        generation_logits=(FloatTensor((count, 2), bytes(range(8 * count))),),
    )


def test_a_cut_result_has_the_values_of_its_kept_tokens() -> None:
    result = cut_at_stop(detailed(5, 6, 7), (TextDelta("", 2, stop_string="x"),))
    assert result.output_token_ids == ((7, 7, 5, 6),)
    assert (result.num_output_tokens, result.finish_reasons) == ((2,), (FinishReason.STOP_WORDS,))
    assert result.is_sequence_final
    assert result.log_probs == ((-0.5, -1.0),)
    assert math.isclose(result.cum_log_probs[0], -3.0 - 1.5)
    assert [top.token_ids for top in result.top_log_probs[0]] == [(0,), (1,)]
    assert result.prompt_log_probs == (0.0, -1.0)
    assert result.generation_logits == (FloatTensor((2, 2), bytes(range(16))),)


def test_cum_log_prob_of_a_cut_result_uses_the_models_log_probs() -> None:
    """The sum is not of normalized log probs, which belong to another distribution."""
    normalized = replace(detailed(5, 6, 7), model_log_probs=((-1.0, -2.0, -4.0),), cum_log_probs=(-7.0,))
    result = cut_at_stop(normalized, (TextDelta("", 2, stop_string="x"),))
    assert result.log_probs == ((-0.5, -1.0),) and result.model_log_probs == ((-1.0, -2.0),)
    assert math.isclose(result.cum_log_probs[0], -3.0)


def test_a_result_without_kept_tokens_is_empty() -> None:
    result = cut_at_stop(detailed(5, 6), (TextDelta("", 0, stop_string="x"),))
    assert result.output_token_ids == ((7, 7),)
    assert result.generation_logits == (FloatTensor((0, 2), b""),)


def test_a_result_without_a_stop_is_unchanged() -> None:
    result = detailed(5, 6)
    assert cut_at_stop(result, (TextDelta("", 2),)) is result


def test_beams_stop_independently() -> None:
    beams = make_beams((5, 6), (5, 7), reason=FinishReason.NOT_FINISHED)
    result = cut_at_stop(beams, (TextDelta("", 1, stop_string="x"), TextDelta("", 2)))
    assert result.output_token_ids == ((5,), (5, 7))
    assert result.finish_reasons == (FinishReason.STOP_WORDS, FinishReason.NOT_FINISHED)
    assert not result.is_sequence_final
    both = cut_at_stop(replace(beams), (TextDelta("", 1, stop_string="x"), TextDelta("", 2, stop_string="x")))
    assert both.is_sequence_final


# -------------------------------------------------------------------- finding the tokenizer


def test_tokenizer_dir_overrides_the_engines_folder(tmp_path: Path) -> None:
    asked: list[str] = []

    def load(directory: str) -> Tokenizer:
        asked.append(directory)
        return letter_tokenizer()

    TokenizerFinder("mine", load).find("the engine's")
    TokenizerFinder(None, load).find("the engine's")
    assert asked == ["mine", "the engine's"]


def test_the_tokenizer_is_loaded_once(tmp_path: Path) -> None:
    finder = TokenizerFinder(save_letter_tokenizer(tmp_path))
    assert finder.require() is finder.require()


def test_a_missing_tokenizer_is_an_error_with_the_remedy() -> None:
    finder = TokenizerFinder(None)
    assert finder.find() is None
    with pytest.raises(
        Unsupported, match=r"serves no text: its checkpoint has no tokenizer.json, and parameter"
    ):
        finder.require()


def test_a_folder_without_tokenizer_is_named_in_the_log_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Unsupported, match="this model serves no text") as refused:
        TokenizerFinder(str(tmp_path)).require()
    assert str(tmp_path) not in str(refused.value)
    assert str(tmp_path) in caplog.text


# -------------------------------------------------------------------- special tokens in stop strings

SPECIAL_ID = 2  # "</s>" of the tiny tokenizers


def spelled(name: str, *parts: str | int) -> tuple[int, ...]:
    """Return the ids of texts; ids are returned unchanged."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else tokenizer(name).encode(part, add_special_tokens=False)
    return tuple(ids)


def run_to_stop(
    name: str, ids: tuple[int, ...], stops: tuple[str, ...], skip: bool, size: int
) -> tuple[str, int, bool]:
    """Return text, number of kept tokens and whether it stopped, for results with `size` tokens each."""
    text = CompletionText(tokenizer(name), (), stop_strings=StopStrings(stops), skip_special_tokens=skip)
    shown, kept, stopped = "", 0, False
    for start in range(0, len(ids), size):
        reason = FinishReason.LENGTH if start + size >= len(ids) else FinishReason.NOT_FINISHED
        (delta,) = text.add(make_result(ids[start : start + size], reason))
        shown, kept, stopped = shown + delta.text, kept + delta.num_kept_tokens, delta.stopped
    return shown, kept, stopped


@pytest.mark.parametrize("size", [1, 3, 99])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_special_token_completes_a_stop_string(name: str, skip: bool, size: int) -> None:
    before = spelled(name, "the dog")
    ids = (*before, SPECIAL_ID, *spelled(name, "sleeps"))
    shown, kept, stopped = run_to_stop(name, ids, ("</s>",), skip, size)
    assert stopped
    assert shown.rstrip() == tokenizer(name).decode(before, skip).rstrip()
    if name != "word_suffix":  # its text is known only at the end
        assert kept == len(before) + 1


@pytest.mark.parametrize("size", [1, 99])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma", "metaspace"])
def test_a_stop_string_may_contain_a_special_token(name: str, skip: bool, size: int) -> None:
    space = (
        "" if name in ("byte_level", "gemma") else " "
    )  # the other tokenizers put a space before a word that is spelled alone
    ids = spelled(name, "the fox", SPECIAL_ID, "the dog", SPECIAL_ID, "the end")
    special = "" if skip else "</s>"
    for stop, expected in (
        ("dog</s>", f"the fox{special}{space}the "),
        (f"</s>{space}the d", "the fox"),
        (f"dog</s>{space}the", f"the fox{special}{space}the "),
        (f"fox{space}the", "the " if skip else f"the fox</s>{space}the dog</s>{space}the end"),
        ("cat</s>", f"the fox{special}{space}the dog{special}{space}the end"),
    ):
        assert run_to_stop(name, ids, (stop,), skip, size)[0] == expected, stop


def test_an_incomplete_character_before_a_stopping_special_token_is_shown() -> None:
    name = "byte_level"
    ids = (*spelled(name, "a"), *byte_ids(name, b"\xe4"), SPECIAL_ID, *byte_ids(name, b"\xbb\x8a"))
    assert run_to_stop(name, ids, ("</s>",), True, 1) == ("a\ufffd", 3, True)
    assert run_to_stop(name, ids, ("never",), True, 1)[0] == "a今"


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_of_a_special_token_ends_every_beam(skip: bool) -> None:
    name = "llama"
    text = CompletionText(tokenizer(name), (), stop_strings=StopStrings(["</s>"]), skip_special_tokens=skip)
    stopping, other = spelled(name, "the dog", SPECIAL_ID), spelled(name, "the fox")
    deltas = text.add(make_beams(stopping, other, reason=FinishReason.LENGTH))
    assert [(delta.text, delta.stopped) for delta in deltas] == [("the dog", True), ("the fox", False)]


@pytest.mark.parametrize("lead", [True, False])
def test_special_tokens_are_shown_unless_skipped(lead: bool) -> None:
    name = "byte_level"
    prompt, ids = spelled(name, "the", SPECIAL_ID), spelled(name, " dog", SPECIAL_ID)
    text = CompletionText(tokenizer(name), prompt, lead=lead, skip_special_tokens=False)
    assert only_text(text, make_result(ids, FinishReason.LENGTH)) == ("the</s>" if lead else "") + " dog</s>"


# -------------------------------------------------------------------- stop strings that are held back


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("min_tokens", "shown", "kept"),
    [
        (0, "xy", 4),
        (3, "xy", 4),  # complete with the fourth token
        (4, "xyabx", 7),
        (6, "xyabx", 7),
        (7, "xyabxaba", 10),
        (9, "xyabxaba", 10),
        (10, "xyabxabaabz", 11),
        (99, "xyabxabaabz", 11),
    ],
)
def test_a_stop_string_ends_nothing_before_min_tokens(
    min_tokens: int, shown: str, kept: int, size: int
) -> None:
    """A stop string counts if it begins before min_tokens and is completed afterwards. This tokenizer's
    tokens are letters."""
    text = CompletionText(
        letter_tokenizer(), ids_of("ab"), None, False, StopStrings(("ab",)), min_tokens=min_tokens
    )
    ids, said, count = ids_of("xyabxabaabz"), "", 0
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        is_last = start + size >= len(ids)
        (delta,) = text.add(
            make_result(
                part, FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED, is_sequence_final=is_last
            )
        )
        said, count = said + delta.text, count + delta.num_kept_tokens
    assert (said, count) == (shown, kept)
