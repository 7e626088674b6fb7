"""Sizes of responses, and the requests refused for them; /dev/shm is two numbers here."""

from __future__ import annotations

import pytest

from inflight.additional_outputs import OfferedOutput, WantedOutput
from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.endpoint.delivery import MAX_MERGED_LOGITS_BYTES
from inflight.errors import InvalidArgument, Unavailable
from inflight.serving.response_size import (
    MAX_RESPONSE_BYTES,
    SMALL_BYTES,
    ResponseBudget,
    response_size,
)

MIB = 1 << 20
VOCABULARY = 1 << 18  # a row of logits has 1 MiB


class Memory:
    """A fake /dev/shm, which counts how often it is measured."""

    def __init__(self, total_mib: int = 64, free_mib: int = 40) -> None:
        self.total, self.free = total_mib * MIB, free_mib * MIB
        self.num_asked = 0

    def __call__(self) -> tuple[int, int]:
        self.num_asked += 1
        return self.total, self.free


def make_request(
    new: int = 10, prompt: int = 5, sampling: SamplingConfig | None = None, draft: int = 0, **output: object
) -> Request:
    return Request(
        0,
        tuple(range(prompt)),
        new,
        sampling=sampling or SamplingConfig(),
        output=OutputOptions(exclude_input_from_output=True, **output),
        draft=ExternalDraft(tuple(range(draft))) if draft else None,
    )


def with_logits(mib: int) -> Request:
    """Return a request whose response has this many MiB of logits."""
    return make_request(new=mib, return_generation_logits=True)


def sizes_of(request: Request, streaming: bool = False, in_one: bool = False) -> dict[str, int]:
    return dict(response_size(request, VOCABULARY, streaming, in_one).outputs)


def reserve(budget: ResponseBudget, *requests: Request, streaming: bool = False, in_one: bool = False) -> int:
    return budget.reserve(requests, VOCABULARY, streaming, in_one)


def sizes_with_logits(mib: int) -> list[tuple[str, int]]:
    return [("generation_logits", mib << 20)]


def send(budget: ResponseBudget, ticket: int, mib: int) -> None:
    with budget.sending(ticket, sizes_with_logits(mib)):
        pass


def answer(budget: ResponseBudget, mib: int, sizes: list[tuple[str, int]]) -> None:
    """Reserve memory for a request with logits of this size, and send a response of these sizes."""
    ticket = reserve(budget, with_logits(mib))
    with budget.sending(ticket, sizes):
        pass
    budget.release(ticket)


# -------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("output", "name", "size"),
    [
        ({"return_log_probs": True}, "output_log_probs", 10 * 4),
        ({"num_top_log_probs": 3}, "top_log_probs", 10 * 3 * (4 + 4)),
        ({"return_prompt_log_probs": True}, "prompt_log_probs", 5 * 4),
        ({"return_context_logits": True}, "context_logits", 5 * MIB),
        ({"return_generation_logits": True}, "generation_logits", 10 * MIB),
    ],
)
def test_only_requested_outputs_count_in_the_size(output: dict[str, object], name: str, size: int) -> None:
    assert sizes_of(make_request(**output))[name] == size
    assert sizes_of(make_request())[name] == 0


def test_every_returned_beam_counts_in_the_size() -> None:
    beams = SamplingConfig(beam_width=4, num_return_sequences=3)
    assert (
        sizes_of(make_request(sampling=beams, return_generation_logits=True))["generation_logits"] == 30 * MIB
    )


def test_sequences_in_one_response_count_together() -> None:
    request = make_request(
        sampling=SamplingConfig(num_return_sequences=3),
        return_generation_logits=True,
        return_context_logits=True,
    )
    apart, together = sizes_of(request), sizes_of(request, in_one=True)
    assert (apart["generation_logits"], together["generation_logits"]) == (10 * MIB, 30 * MIB)
    assert apart["context_logits"] == together["context_logits"] == 5 * MIB


def test_a_response_of_a_stream_has_at_most_the_joined_logits() -> None:
    long, short = with_logits(1000), with_logits(2)
    assert sizes_of(long, streaming=True)["generation_logits"] == MAX_MERGED_LOGITS_BYTES
    assert sizes_of(short, streaming=True)["generation_logits"] == 2 * MIB
    drafted = make_request(new=100, draft=20, return_generation_logits=True)
    assert sizes_of(drafted, streaming=True)["generation_logits"] == 21 * MIB  # joined into one response
    beams = make_request(sampling=SamplingConfig(beam_width=2), return_generation_logits=True)
    assert sizes_of(beams, streaming=True)["generation_logits"] == 0


def test_the_prompt_counts_in_the_size_if_it_is_returned() -> None:
    request = Request(0, tuple(range(100)), 10)
    whole, streamed = sizes_of(request), sizes_of(request, streaming=True)
    assert whole["output_ids and text"] == 11 * streamed["output_ids and text"]


# -------------------------------------------------------------------- refusals


def test_a_small_request_needs_no_reservation() -> None:
    memory = Memory(total_mib=0, free_mib=0)
    budget = ResponseBudget(memory)
    assert reserve(budget, make_request(new=1000, return_log_probs=True)) == 0
    send(budget, 0, 1)
    budget.release(0)
    assert memory.num_asked == 0


def test_the_message_limit_of_grpc_is_enforced() -> None:
    budget = ResponseBudget(Memory(1 << 20, 1 << 20))
    most = MAX_RESPONSE_BYTES // MIB
    assert reserve(budget, with_logits(most - 1))
    with pytest.raises(
        InvalidArgument, match=r"2\.00 GiB \(generation_logits 2\.00 GiB\), but a gRPC message"
    ):
        reserve(budget, with_logits(most + 1))


def test_prompts_of_a_batch_in_one_response_count_together() -> None:
    budget = ResponseBudget(Memory(1 << 20, 1 << 20))
    half = with_logits(1100)
    assert reserve(budget, half, half)
    with pytest.raises(InvalidArgument, match="2 GiB"):
        reserve(budget, half, half, in_one=True)


def test_lists_in_a_response_are_limited_by_the_size_of_endpoint_frames() -> None:
    budget = ResponseBudget(Memory(1 << 20, 1 << 20))
    with pytest.raises(InvalidArgument, match=r"at most 256\.0 MiB"):
        reserve(budget, make_request(new=100_000, num_top_log_probs=1000))


def test_a_response_larger_than_shared_memory_is_an_invalid_request() -> None:
    with pytest.raises(InvalidArgument) as caught:
        reserve(ResponseBudget(Memory(total_mib=64, free_mib=64)), with_logits(61))
    for word in (
        "61.0 MiB",
        "generation_logits",
        "64.0 MiB in all",
        "--shm-size",
        "130m",
        "request_output_len",
    ):
        assert word in str(caught.value)


def test_a_response_larger_than_free_shared_memory_is_unavailable() -> None:
    memory = Memory(total_mib=64, free_mib=40)
    budget = ResponseBudget(memory)
    with pytest.raises(Unavailable, match=r"40\.0 MiB are free and 0\.0 MiB may be needed"):
        reserve(budget, with_logits(37))  # and 4 for the pool's growth step
    memory.free = 41 * MIB + SMALL_BYTES
    assert reserve(budget, with_logits(37))


def test_room_is_reserved_until_requests_are_answered() -> None:
    budget = ResponseBudget(Memory(total_mib=64, free_mib=40))
    ticket = reserve(budget, with_logits(20))
    with pytest.raises(Unavailable, match=r"24\.0 MiB may be needed by requests in flight"):
        reserve(budget, with_logits(25))
    budget.release(ticket)
    assert reserve(budget, with_logits(25))


def test_requests_of_equal_size_share_room() -> None:
    budget = ResponseBudget(Memory(total_mib=64, free_mib=40))
    tickets = [reserve(budget, with_logits(30)) for _ in range(5)]
    assert len(set(tickets)) == 5


def test_a_size_that_was_sent_once_fits_again() -> None:
    memory = Memory(total_mib=64, free_mib=40)
    budget = ResponseBudget(memory)
    answer(budget, 30, sizes_with_logits(30))
    memory.free = 0  # the pool does not shrink
    assert reserve(budget, with_logits(30))
    assert reserve(budget, with_logits(12))
    with pytest.raises(Unavailable):
        reserve(budget, with_logits(31))


def test_room_for_two_tensors_is_not_room_for_one_as_large_as_both() -> None:
    memory = Memory(total_mib=64, free_mib=60)
    budget = ResponseBudget(memory)
    answer(budget, 20, [("a", 10 << 20), ("b", 10 << 20)])
    memory.free = 0
    assert reserve(budget, with_logits(10))
    with pytest.raises(Unavailable):
        reserve(budget, with_logits(20))


def test_each_size_that_was_sent_once_fits_again() -> None:
    """Also one that takes less than another in all, but more for one tensor."""
    memory = Memory(total_mib=128, free_mib=100)
    budget = ResponseBudget(memory)
    for sizes in ([("a", 11 << 20), ("b", 11 << 20)], sizes_with_logits(20)) * 2:
        answer(budget, 25, sizes)
    memory.free = 0
    assert reserve(budget, with_logits(20))
    with pytest.raises(Unavailable):
        reserve(budget, with_logits(23))


def test_a_response_is_not_sent_without_room() -> None:
    memory = Memory(total_mib=64, free_mib=40)
    budget = ResponseBudget(memory)
    ticket = reserve(budget, with_logits(30))
    memory.free = 0
    sent = []
    with pytest.raises(Unavailable, match="--shm-size"), budget.sending(ticket, sizes_with_logits(30)):
        sent.append(30)
    assert not sent
    send(budget, ticket, 0)  # an error, for example, is small


def test_a_failed_send_does_not_count_as_room() -> None:
    memory = Memory(total_mib=64, free_mib=40)
    budget = ResponseBudget(memory)
    ticket = reserve(budget, with_logits(30))
    with pytest.raises(RuntimeError), budget.sending(ticket, sizes_with_logits(30)):
        raise RuntimeError("Failed to increase the shared memory pool size")
    budget.release(ticket)
    memory.free = 0
    with pytest.raises(Unavailable):
        reserve(budget, with_logits(30))


def test_the_real_shared_memory_is_measured() -> None:
    assert reserve(ResponseBudget(), with_logits(1))


def test_additional_outputs_count_if_they_are_requested() -> None:
    offered = (OfferedOutput("last_hidden_state", True, 1 << 18), OfferedOutput("top_4_logits", True, 4))
    wanted = (WantedOutput("last_hidden_state", True),)
    request = make_request(additional_outputs=wanted, sampling=SamplingConfig(num_return_sequences=2))
    apart = dict(response_size(request, VOCABULARY, False, False, offered).outputs)
    together = response_size(request, VOCABULARY, False, True, offered)
    assert apart["context_last_hidden_state"] == 5 * MIB
    assert (apart["generation_last_hidden_state"], apart["generation_top_4_logits"]) == (10 * MIB, 0)
    assert dict(together.outputs)["generation_last_hidden_state"] == 20 * MIB
    assert together.listed_bytes < MIB
    long = make_request(new=1000, additional_outputs=wanted)
    streamed = dict(response_size(long, VOCABULARY, True, False, offered).outputs)
    assert streamed["generation_last_hidden_state"] == MAX_MERGED_LOGITS_BYTES


def test_additional_outputs_without_room_are_refused_at_admission() -> None:
    offered = (OfferedOutput("last_hidden_state", False, 1 << 18),)
    request = make_request(new=100, additional_outputs=(WantedOutput("last_hidden_state"),))
    budget = ResponseBudget(Memory())
    with pytest.raises(
        InvalidArgument, match=r"generation_last_hidden_state 100\.0 MiB.*additional_outputs;"
    ):
        budget.reserve([request], VOCABULARY, False, False, offered)
    budget.reserve([request], VOCABULARY, True, False, offered)
