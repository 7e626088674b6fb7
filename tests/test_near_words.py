"""The words that error messages suggest for an unknown one."""

from __future__ import annotations

from inflight.near_words import did_you_mean, listed


def test_of_many_words_the_last_ones_are_counted() -> None:
    words = [f"word{number}" for number in range(12)]
    assert listed(words[:2]) == "word0, word1"
    assert listed(words[:10]) == ", ".join(words[:10])
    assert listed(words) == f"{', '.join(words[:10])} and 2 more"


def test_only_a_similar_word_is_suggested() -> None:
    assert did_you_mean("uper", ("lower", "upper")) == "; did you mean 'upper'?"
    assert did_you_mean("other", ("lower", "upper")) == ""
