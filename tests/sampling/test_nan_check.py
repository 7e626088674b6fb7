"""Logits that are not finite: the batch's error names the rows, and other rows are not affected."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from inflight.core.request.request import OutputOptions
from inflight.core.schedule.batch import BeamGroup, ScheduledBatch
from tests.sampling.factories import Row, decode_rows, make_request, make_sampler, start_batch

pytestmark = pytest.mark.usefixtures("row_kernels")

NAN, INF = float("nan"), float("inf")
PROMPT = (3, 1, 3, 2)
KINDS = {
    "greedy": {},
    "few": {"top_k": 3},
    "many": {"top_k": 300},
    "small nucleus": {"top_p": 0.5},
    "large nucleus": {"top_p": 0.97},
    "all": {"top_p": 1.0},
    "min_p": {"min_p": 0.1},
    "everything": {"top_k": 4, "top_p": 0.7, "min_p": 0.2, "temperature": 0.3},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "no_repeat_ngram_size": 2},
}
DETAILS = OutputOptions(return_log_probs=True, num_top_log_probs=2)


def _rows(number: int) -> list[Row]:
    """Make one row of each kind, the first `number` times; some request log probabilities."""
    kinds = [KINDS["greedy"]] * number + list(KINDS.values())[1:]
    outputs = [DETAILS if index % 2 else OutputOptions() for index in range(len(kinds))]
    return [Row(make_request(PROMPT, output=out, **kind)) for kind, out in zip(kinds, outputs, strict=True)]


def _poison(logits: torch.Tensor, row: int, value: float, everywhere: bool) -> torch.Tensor:
    poisoned = logits.clone()
    poisoned[row, slice(None) if everywhere else slice(3, None, 7)] = value
    return poisoned


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("everywhere", [True, False])
def test_the_error_of_a_greedy_batch_names_the_faulty_row(value: float, everywhere: bool) -> None:
    rows = [Row(make_request(PROMPT)) for _ in range(4)]
    logits = _poison(torch.randn(4, 50), 2, value, everywhere)
    with pytest.raises(
        FloatingPointError, match=f"logit is {value} for position 4 of slot 7; expected a num"
    ):
        decode_rows(logits, rows, make_sampler(9, 50), slots=[5, 3, 7, 1])


@pytest.mark.parametrize("size", [20, 5000])
@pytest.mark.parametrize(
    ("value", "everywhere"), [(NAN, True), (NAN, False), (INF, True), (INF, False), (-INF, True)]
)
def test_a_faulty_row_is_named_and_changes_no_other(size: int, value: float, everywhere: bool) -> None:
    """The faulty row may ask for any sampling; the check is patched away to see the tokens of the others."""
    rows = _rows(1)
    logits = torch.randn(len(rows), size, generator=torch.Generator().manual_seed(1))
    expected = decode_rows(logits.clone(), rows)
    for faulty in range(len(rows)):
        poisoned = _poison(logits, faulty, value, everywhere)
        with pytest.raises(FloatingPointError, match=f"is {value} for position 4 of slot {faulty};"):
            decode_rows(poisoned.clone(), rows)
        with mock.patch("inflight.sampling.sampler.check_peaks"):
            output = decode_rows(poisoned, rows)
        assert all(0 <= token < size for token in output.token_ids[faulty])
        for row in set(range(len(rows))) - {faulty}:
            assert output.token_ids[row] == expected.token_ids[row]
            assert output.details.get(row) == expected.details.get(row)


def test_every_faulty_row_is_named() -> None:
    logits = torch.randn(4, 50)
    logits[1, 3], logits[3, 4] = NAN, INF
    with pytest.raises(FloatingPointError) as error:
        decode_rows(logits, [Row(make_request(PROMPT, top_k=5)) for _ in range(4)])
    assert "nan for position 4 of slot 1, inf for position 4 of slot 3;" in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_banned_tokens_are_not_reported_as_nan(kind: str) -> None:
    logits = _poison(torch.randn(1, 5000), 0, -INF, everywhere=False)
    ((token,),) = decode_rows(logits, [Row(make_request(PROMPT, **KINDS[kind]))]).token_ids
    assert token % 7 != 3


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("with_logits", [False, True])
def test_a_draft_row_with_nan_is_named(sampling: dict[str, float], with_logits: bool) -> None:
    """Rows up to the one that rejects a draft are checked, later ones are not."""
    logits = torch.full((4, 50), -9.0)
    for row, token in enumerate((10, 11, 12, 13)):
        logits[row, token] = 9.0
    drafts = (10, 49, 12)
    given = torch.full((3, 50), -9.0).scatter_(1, torch.tensor(drafts)[:, None], 9.0)
    row = Row(
        make_request(PROMPT, drafts=drafts, draft_logits=given if with_logits else None, **sampling),
        (),
        0,
        drafts,
    )
    (expected,) = decode_rows(logits.clone(), [row]).token_ids
    assert expected == (10, 11)
    for behind in (2, 3):
        assert decode_rows(_poison(logits, behind, NAN, True), [row]).token_ids == [expected]
    for before in (0, 1):
        with pytest.raises(FloatingPointError, match=f"nan for position {4 + before} of slot 0;"):
            decode_rows(_poison(logits, before, NAN, True), [row])


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_beam_with_nan_is_named(value: float) -> None:
    """One NaN beam fails its search; other rows and the other search are not affected."""
    requests = [make_request(PROMPT, beam_width=2), make_request(PROMPT, beam_width=2, output=DETAILS)]
    rows = [Row(request, (5,)) for request in requests for _ in range(2)] + [Row(make_request(PROMPT), (5,))]
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(2))
    groups = (BeamGroup((0, 1), (0.0, -1.0), 4), BeamGroup((2, 3), (0.0, -1.0), 4))

    def decode(values: torch.Tensor):
        sampler = make_sampler(5, 5000)
        batch, positions = start_batch(rows)
        batch = ScheduledBatch(
            0, starts=batch.starts, generation_slots=batch.generation_slots, beam_groups=groups
        )
        sampler.apply(batch)
        return sampler.decode(batch, values, positions)

    expected = decode(logits.clone())
    for faulty in range(4):
        poisoned = _poison(logits, faulty, value, everywhere=False)
        with pytest.raises(FloatingPointError, match=f"{value} for position 5 of slot {faulty};"):
            decode(poisoned.clone())
        with mock.patch("inflight.sampling.sampler.check_peaks"):
            output = decode(poisoned)
        innocent = 1 - faulty // 2
        assert output.beams[innocent] == expected.beams[innocent]
        assert output.token_ids[-1] == expected.token_ids[-1]


def test_a_failed_batch_leaves_no_state() -> None:
    """Restarted rows choose the same tokens as without the failed batch."""
    samplings = [
        {"repetition_penalty": 1.5},
        {"top_p": 0.9, "top_p_decay": 0.5, "top_p_reset_id": 4},
        {"top_k": 9},
    ]
    rows = [Row(make_request(PROMPT, **sampling)) for sampling in samplings]
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    expected = [decode_rows(logits[[index]].clone(), [row]).token_ids[0] for index, row in enumerate(rows)]
    sampler = make_sampler(3, 50)
    with pytest.raises(FloatingPointError):
        decode_rows(_poison(logits, 2, NAN, True), rows, sampler)
    assert decode_rows(logits[:2].clone(), rows[:2], sampler, slots=[1, 0]).token_ids == expected[:2]
