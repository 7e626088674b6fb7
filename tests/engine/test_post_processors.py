"""Logits post-processors through scheduler and engine: with chunks, pauses, reuse, drafts, beams and ranks."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from inflight.config import CapacityPolicy
from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.errors import StepFailed
from inflight.sampling import LogitsPostProcessors
from tests.engine.ranks import TOPOLOGIES, assert_same, ranks
from tests.engine.serving import WAYS, Served, config_of, load, serve
from tests.models.zoo import Zoo, ZooModel
from tests.tiers import with_all

SIZE = 2


def no_repeats(req_id, logits, ids, stream_ptr, client_id):
    """Logits post-processor equal to the control no_repeat_ngram_size, by transformers."""
    logits[0] = NoRepeatNGramLogitsProcessor(SIZE)(torch.tensor(ids, device=logits.device), logits[0].clone())


def no_repeats_batched(req_ids, logits, ids, stream_ptr, client_ids):
    return [
        NoRepeatNGramLogitsProcessor(SIZE)(torch.tensor(beams, device=each.device), each[0].clone())[None]
        for each, beams in zip(logits, ids, strict=True)
    ]


PROCESSORS = LogitsPostProcessors({"no-repeats": no_repeats}, no_repeats_batched)


def some_of_everything(model: ZooModel) -> list[Request]:
    """Return requests of every kind, with the control."""
    control = SamplingConfig(no_repeat_ngram_size=SIZE)
    sampled = replace(control, temperature=0.8, top_k=20, random_seed=3, repetition_penalty=1.2)
    prompt, other = model.prompt(33), model.prompt(21, seed=1)
    details = OutputOptions(return_log_probs=True, num_top_log_probs=2, return_generation_logits=True)
    return [
        Request(1, prompt, 20, streaming=True, sampling=control),
        Request(2, prompt, 20, sampling=sampled, output=details),
        Request(3, other, 16, sampling=replace(control, beam_width=3)),
        Request(4, (*prompt, *prompt), 16, sampling=control, prompt_lookup_num_tokens=3),
        Request(5, other, 12, sampling=sampled, draft=ExternalDraft((5, 6, 7))),
        Request(6, other[:9], 14, sampling=replace(sampled, num_return_sequences=2)),
        Request(7, model.prompt(40, 5), 30),
        *(Request(number, model.prompt(6 + number, number), 40, sampling=control) for number in (8, 9, 10)),
    ]


def by_post_processor(requests: list[Request], name: str) -> list[Request]:
    """Return the same requests with a post-processor instead of the control."""
    return [
        replace(
            request,
            sampling=replace(request.sampling, no_repeat_ngram_size=0),
            logits_post_processor_name=name if request.sampling.no_repeat_ngram_size else "",
        )
        for request in requests
    ]


STATIC = {"policy": CapacityPolicy.STATIC_BATCH}


@pytest.mark.parametrize(
    ("way", "name"),
    with_all(
        itertools.product([*WAYS, "static"], ["no-repeats", "batched"]),
        [("utilization-chunked-no-reuse", "no-repeats"), ("static", "batched")],
    ),
)
def test_a_post_processor_gives_the_same_tokens_as_the_equal_control(zoo: Zoo, way: str, name: str) -> None:
    model = zoo["llama-gqa"]
    requests = some_of_everything(model)
    engine = load(model.folder, 28, 8, PROCESSORS)
    expected = serve(engine, config_of("no-evict"), requests)
    config = config_of("no-evict", **STATIC) if way == "static" else config_of(way)
    served = serve(engine, config, by_post_processor(requests, name))
    assert_same(served, expected)
    for request in requests[:5]:
        assert served.tokens(request) == expected.tokens(request)
    if "utilization" in way:
        assert served.num_pauses > 0


@pytest.mark.parametrize("name", ["fails", "batched"])
def test_a_failing_post_processor_ends_its_own_request_alone(zoo: Zoo, name: str) -> None:
    """The failure is in the context, later, in a beam search, in one of two sequences, or after accepted
    drafts."""
    model = zoo["llama-gqa"]
    requests = by_post_processor(some_of_everything(model), "no-repeats")
    ends = {2: 33, 3: 24, 4: 70, 6: 12}  # by request id, the number of tokens at which it fails

    def fails(req_id, logits, ids, stream_ptr, client_id):
        if len(ids[0]) >= ends[req_id]:
            raise RuntimeError(f"enough of {req_id}")
        no_repeats(req_id, logits, ids, stream_ptr, client_id)

    def batched(req_ids, *lists):
        for req_id, logits, ids in zip(req_ids, *lists[:2]):
            fails(req_id, logits, ids, 0, None)

    processors = LogitsPostProcessors({"no-repeats": no_repeats, "fails": fails}, batched)
    failing = [
        replace(each, logits_post_processor_name=name) if each.request_id in ends else each
        for each in requests
    ]
    if name == "batched":  # only one of them, otherwise all requests of a call would end
        failing = [each for each in failing if each.request_id not in (2, 3, 6)]
        requests = [each for each in requests if each.request_id not in (2, 3, 6)]
    engine = load(model.folder, 28, 8, processors)
    alone = serve(engine, config_of("utilization-chunked-no-reuse"), requests)
    served = serve(engine, config_of("utilization-chunked-no-reuse"), failing, may_fail=ends)
    assert {request_id: str(error) for request_id, error in served.errors.items()} == {
        number: f"the logits post-processor {name!r} raised RuntimeError: enough of {number}"
        for number in (request.request_id for request in failing)
        if number in ends
    }
    assert {type(error) for error in served.errors.values()} == {StepFailed}
    for request in requests:
        if request.request_id not in ends:
            assert served.result(request) == alone.result(request)


def test_a_failed_batched_call_ends_all_of_its_requests_and_no_others(zoo: Zoo) -> None:
    model = zoo["llama"]

    def batched(req_ids, logits, ids, stream_ptr, client_ids):
        if len(ids[0][0]) == 15:
            raise ValueError("fifteen")

    plain = [Request(number, model.prompt(10, number), 12) for number in (1, 2, 3)]
    requests = [replace(each, logits_post_processor_name="batched") for each in plain[:2]] + plain[2:]
    engine = load(model.folder, 28, 4, LogitsPostProcessors({}, batched))
    served = serve(engine, config_of("no-evict"), requests, per_iteration=3, may_fail=(1, 2))
    assert served.errors.keys() == {1, 2} and "faulty one of this call's 2 requests" in str(served.errors[1])
    assert served.tokens(3) == model.greedy(plain[2].input_token_ids, 12)


def test_a_post_processor_is_called_once_for_each_token(zoo: Zoo) -> None:
    """A post-processor is called once per token even if the context is computed in chunks."""
    model = zoo["llama"]
    calls: list[list[int]] = []
    note = LogitsPostProcessors({"note": lambda req_id, logits, ids, *_: calls.append(ids[0])})
    request = Request(1, model.prompt(90), 12, logits_post_processor_name="note")
    served = serve(load(model.folder, 28, 4, note), config_of("chunked"), [request])
    tokens = served.tokens(request)
    assert tokens == model.greedy(request.input_token_ids, 12)
    assert calls == [[*request.input_token_ids, *tokens[:count]] for count in range(12)]


# ---------------------------------------------------------------------- several ranks


@cache
def _by_one_rank(model: ZooModel) -> Served:
    requests = by_post_processor(some_of_everything(model), "no-repeats")
    return serve(load(model.folder, 28, 8, PROCESSORS), config_of("utilization-chunked-no-reuse"), requests)


def thread_of_rank() -> int:
    return int(threading.current_thread().name.split("-")[1].split("_")[0])


@pytest.mark.parametrize(
    "topology", with_all([pytest.param(sizes, id=name) for name, sizes in TOPOLOGIES.items()], [(2, 2)])
)
@pytest.mark.parametrize("replicate", [True, False])
def test_several_ranks_give_the_results_of_one_rank_and_the_right_ranks_call_post_processors(
    zoo: Zoo, topology: tuple[int, int], replicate: bool
) -> None:
    """Every rank that has the logits makes the same calls, or only the rank that samples does."""
    model = zoo["llama-gqa"]
    requests = by_post_processor(some_of_everything(model), "note")
    calls: dict[int, Counter] = {}

    def note(req_id, logits, ids, stream_ptr, client_id):
        seen = (req_id, tuple(map(tuple, ids)))
        calls.setdefault(thread_of_rank(), Counter())[seen] += 1
        no_repeats(req_id, logits, ids, stream_ptr, client_id)

    way = config_of("utilization-chunked-no-reuse")
    one = _by_one_rank(model)
    processors = LogitsPostProcessors({"note": note}, replicate=replicate)
    with ranks(model.folder, topology, 28, 8, processors) as engine:
        many: Served = serve(engine, way, requests)
    assert_same(many, one)
    tp_size, pp_size = topology
    last_stage = range(tp_size * (pp_size - 1), tp_size * pp_size)
    assert sorted(calls) == (list(last_stage) if replicate else [last_stage[0]])
    assert all(each == calls[last_stage[0]] for each in calls.values())
    assert many.num_pauses > 0


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_a_row_that_fails_ends_alone_on_all_ranks(zoo: Zoo, topology: tuple[int, int]) -> None:
    """A post-processor raises on one rank of two: only the result of the rank that samples counts."""
    model = zoo["llama-gqa"]

    def at_the_sampler(req_id, logits, ids, stream_ptr, client_id):
        if len(ids[0]) == 12 and thread_of_rank() == topology[1] - 1:
            raise ValueError("at the sampler")

    def elsewhere(req_id, logits, ids, stream_ptr, client_id):
        if len(ids[0]) == 12 and thread_of_rank() != topology[1] - 1:
            raise ValueError("elsewhere")

    processors = LogitsPostProcessors({"a": at_the_sampler, "b": elsewhere})
    plain = [Request(number, model.prompt(10, number), 12) for number in (1, 2, 3)]
    requests = [
        replace(request, logits_post_processor_name=name)
        for request, name in zip(plain, ("a", "b", ""), strict=True)
    ]
    with ranks(model.folder, topology, 28, 8, processors) as engine:
        served = serve(engine, config_of("no-evict"), requests, may_fail=(1,))
    assert list(served.errors) == [1] and str(served.errors[1]).endswith("raised ValueError: at the sampler")
    for request in plain[1:]:
        assert served.tokens(request) == model.greedy(request.input_token_ids, 12)
