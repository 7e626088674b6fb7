"""GptManager behind a LocalEngineClient: many threads, and one final response for each request."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from inflight.adapters.cache import HostAdapterCache
from inflight.adapters.lora_rows import CheckedAdapter
from inflight.batch_manager import GptManager
from inflight.config import CapacityPolicy, SchedulingConfig
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import EngineLimits
from inflight.core.scheduler import Scheduler
from inflight.endpoint.local import LocalEngineClient
from inflight.errors import BadAdapter
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.fake_model import expected_tokens

LIMITS = EngineLimits(
    vocab_size=97, max_sequence_length=200, max_num_sequences=8, num_blocks=60, tokens_per_block=4
)


class Receiver:
    """Collects the responses of one request."""

    def __init__(self) -> None:
        self.responses: list[Response] = []
        self.done = threading.Event()

    def __call__(self, response: Response) -> None:
        assert not self.done.is_set(), "a response after the final one"
        self.responses.append(response)
        if response.is_final:
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        return [token for response in self.responses for token in response.result.output_token_ids[0]]


def start_server() -> tuple[LocalEngineClient, GptManager]:
    scheduler = Scheduler(SchedulingConfig(CapacityPolicy.MAX_UTILIZATION), LIMITS)
    client = LocalEngineClient(EngineDescription(scheduler.limits), lambda: manager.notify())
    manager = GptManager(
        FakeEngine(LIMITS),
        scheduler,
        client.get_inference_requests,
        client.send_response,
        client.poll_stop_signals,
        on_death=client.fail_all,
    )
    return client, manager


def test_requests_of_many_threads_are_answered_or_cancelled():
    client, manager = start_server()
    failures: list[BaseException] = []

    def submit(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(15):
                prompt = tuple(rng.randrange(97) for _ in range(rng.randint(1, 40)))
                receiver = Receiver()
                length = rng.randint(1, 60)
                handle = client.submit(Request(0, prompt, length, streaming=True), receiver)
                if rng.random() < 0.4:
                    handle.stop()
                assert receiver.done.wait(30), "no final response"
                expected = expected_tokens(prompt, length, 97)
                assert receiver.tokens == expected[: len(receiver.tokens)]
                cancelled = receiver.responses[-1].result.finish_reasons[0] is FinishReason.CANCELLED
                assert cancelled or receiver.tokens == expected
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=submit, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manager.shutdown()
    client.close()
    assert failures == []


def test_closing_answers_the_remaining_requests():
    client, manager = start_server()
    manager.shutdown()
    receiver = Receiver()
    client.submit(Request(0, (1, 2), 5), receiver)
    client.close()
    assert receiver.done.is_set()
    assert receiver.responses[-1].error.code == "UNAVAILABLE"


@contextmanager
def awaiting_adapters(
    config: SchedulingConfig,
) -> Iterator[tuple[LocalEngineClient, Scheduler, HostAdapterCache]]:
    """Serve requests whose adapters are not read before the end."""
    limits = replace(LIMITS, num_adapter_pages=4, adapter_page_rank=8, max_adapter_rank=8)
    scheduler, may_read = Scheduler(config, limits), threading.Event()

    def read(lora: LoraRequest) -> CheckedAdapter:
        assert may_read.wait(60)
        raise BadAdapter("no such adapter")

    client = LocalEngineClient(EngineDescription(limits), lambda: manager.notify())
    cache = HostAdapterCache(read, 100, lambda: manager.notify())
    manager = GptManager(
        FakeEngine(limits),
        scheduler,
        client.get_inference_requests,
        client.send_response,
        client.poll_stop_signals,
        adapters=cache,
    )
    yield client, scheduler, cache
    may_read.set()
    assert manager.shutdown()
    cache.close()


def test_a_request_that_ends_while_it_waits_for_its_adapter_is_forgotten_without_another_request():
    with awaiting_adapters(SchedulingConfig()) as (client, _, cache):
        receiver = Receiver()
        handle = client.submit(Request(0, (1, 2), 5, lora=LoraRequest(1)), receiver)
        wait_until(lambda: [each.users for each in cache.list_adapters()] == [1])
        handle.stop()
        assert receiver.done.wait(60)
        wait_until(lambda: [each.users for each in cache.list_adapters()] == [0])


def test_a_request_for_which_there_was_no_room_starts_when_another_ends_though_the_rest_wait_for_adapters():
    with awaiting_adapters(SchedulingConfig(max_num_requests=2)) as (client, scheduler, _):
        handles = [
            client.submit(Request(0, (1, 2), 5, lora=LoraRequest(task)), Receiver()) for task in (1, 2)
        ]
        wait_until(lambda: scheduler.num_active == 2)
        receiver = Receiver()
        client.submit(Request(0, (1, 2), 5), receiver)
        handles[0].stop()
        assert receiver.done.wait(60), "a request waits although there is room"


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)
