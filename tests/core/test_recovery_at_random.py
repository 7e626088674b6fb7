"""Random failures in random runs: no request is affected by another one's fault."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config import CapacityPolicy
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.testing.fake_model import expected_beam_steps
from tests.tiers import examples

from .factories import make_limits, make_request, make_scheduler
from .faulty import FaultyDevice, at_token, run
from .test_recovery import SEVERAL, TWO_BEAMS, VOCABULARY, assert_unharmed


@settings(max_examples=examples(fast=50, all=100), deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(CapacityPolicy),
    num_blocks=st.integers(8, 20),
    num_slots=st.integers(3, 6),
    chunked=st.booleans(),
    reuse=st.booleans(),
    depth=st.integers(1, 2),
    applies=st.booleans(),
    shapes=st.lists(
        st.tuples(
            st.integers(1, 9),
            st.integers(1, 9),
            st.integers(0, 6),
            st.sampled_from(["", "", "several", "beams"]),
        ),
        min_size=1,
        max_size=6,
    ),
    faulty=st.dictionaries(st.integers(1, 6), st.integers(1, 9), max_size=3),
    once=st.sets(st.integers(0, 20), max_size=3),
)
def test_only_faulty_requests_end_with_an_error(
    policy, num_blocks, num_slots, chunked, reuse, depth, applies, shapes, faulty, once
):
    """A request without a fault ends with an error only if it was alone in an iteration that failed by
    itself."""
    limits = {"num_blocks": num_blocks, "max_num_sequences": num_slots}
    arrivals: dict[int, list[Request]] = {}
    kinds = {
        "": SamplingConfig(),
        "several": SEVERAL,
        "beams": TWO_BEAMS,
    }
    for number, (prompt, new, arrival, kind) in enumerate(shapes, 1):
        request = make_request(number, prompt, new, streaming=True, sampling=kinds[kind])
        arrivals.setdefault(arrival, []).append(request)
    arrived = {request.request_id: request for group in arrivals.values() for request in group}
    faults = {
        number: at_token(arrived[number], token) for number, token in faulty.items() if number in arrived
    }
    device = FaultyDevice(make_limits(**limits), faults, applies)
    device.once.update(once)
    scheduler = make_scheduler(policy, 16, chunked, reuse, **limits)
    outcome = run(scheduler, device, arrivals, depth)
    for number, request in arrived.items():
        if number in outcome.failed():
            assert number in faults or once
        elif request.sampling.uses_beams:
            steps = expected_beam_steps(request, VOCABULARY)
            assert [response.result.output_token_ids for response in outcome.responses[number]] == [
                tuple(beam.token_ids for beam in beams) for beams in steps
            ]
        else:
            assert_unharmed(outcome, request)
            assert number not in faults or faulty[number] > request.max_new_tokens
