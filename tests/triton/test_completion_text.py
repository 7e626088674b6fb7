"""Where the tokenizer comes from, and what text_output is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.core.stop import FinishReason
from inflight.errors import Unsupported
from inflight.text.tokenizer import Tokenizer
from inflight.triton.completion_text import CompletionText, TokenizerFinder
from tests.triton.factories import make_result
from tests.triton.letters import letter_tokenizer, save_letter_tokenizer


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(letter_tokenizer().encode(text))


def make_text(prompt: str = "ab", prompt_text: str | None = None, lead: bool = True) -> CompletionText:
    return CompletionText(letter_tokenizer(), ids_of(prompt), prompt_text, lead)


def test_the_prompt_leads_as_it_came() -> None:
    text = make_text("ab", prompt_text="AB!")
    assert text.add(make_result(ids_of("cd"), FinishReason.LENGTH), True) == "AB!cd"


def test_a_prompt_of_ids_leads_as_text() -> None:
    assert make_text("ab").add(make_result(ids_of("cd"), FinishReason.LENGTH), True) == "abcd"


def test_no_lead() -> None:
    assert make_text(lead=False).add(make_result(ids_of("cd"), FinishReason.LENGTH), True) == "cd"


def test_the_prompts_ids_in_the_output_are_not_the_completion() -> None:
    result = make_result(ids_of("abcd"), FinishReason.LENGTH, num_output_tokens=2)
    assert make_text().add(result, True) == "abcd"


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.TIMED_OUT])
def test_a_request_that_was_cut_short_has_no_text(reason: FinishReason) -> None:
    assert make_text(lead=True).add(make_result((), reason), True) == ""


def test_nothing_generated() -> None:
    result = make_result(ids_of("ab"), FinishReason.END_ID, num_output_tokens=0)
    assert make_text(lead=False).add(result, True) == ""
    assert make_text(lead=True).add(result, True) == "ab"


def test_deltas_together_are_the_whole() -> None:
    text = make_text(lead=False)
    parts = [text.add(make_result(ids_of(part)), part == "") for part in ("c", "de", "")]
    assert parts == ["c", "de", ""]


def test_the_parameter_comes_before_the_engines_folder(tmp_path: Path) -> None:
    asked: list[str] = []

    def load(directory: str) -> Tokenizer:
        asked.append(directory)
        return letter_tokenizer()

    TokenizerFinder("mine", load).find("the engine's")
    TokenizerFinder(None, load).find("the engine's")
    assert asked == ["mine", "the engine's"]


def test_it_is_loaded_once(tmp_path: Path) -> None:
    finder = TokenizerFinder(save_letter_tokenizer(tmp_path))
    assert finder.require() is finder.require()


def test_none_says_what_to_do() -> None:
    finder = TokenizerFinder(None)
    assert finder.find() is None
    with pytest.raises(
        Unsupported, match=r"serves no text: its checkpoint has no tokenizer.json, and parameter"
    ):
        finder.require()


def test_a_folder_without_one_says_where(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=str(tmp_path)):
        TokenizerFinder(str(tmp_path)).require()
