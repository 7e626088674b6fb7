"""The waiting queue: exact orders, and random calls compared with a model that sorts everything each time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule import waiting_queue
from inflight.core.schedule.waiting_queue import WaitingQueue
from inflight.testing.simulation.integrity import check_integrity

from .factories import make_sequence

TWO_BEAMS = SamplingConfig(beam_width=2)
THREE_SEQUENCES = SamplingConfig(top_k=2, num_return_sequences=3)


class Turns:
    """A queue and the order of its starts as text: one letter for each client, A for client 1."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self._next_key = 0

    def add(self, client: int = 1, new: int = 9, prompt: int = 1, **fields) -> LlmRequest:
        self._next_key += 1
        sequence = make_sequence(self._next_key, prompt=prompt, new=new, client_id=client, **fields)
        self.queue.add(sequence)
        return sequence

    def start(self) -> LlmRequest:
        first = self.queue.first()
        assert first is not None
        assert self.queue.remove(first) is False
        self.queue.charge(first)
        first.start((0,), 0)
        check_integrity(self.queue)
        return first

    def starts(self, count: int) -> str:
        return "".join("-ABC"[self.start().request.client_id] for _ in range(count))

    def end(self, sequence: LlmRequest, num_generated: int | None = None) -> None:
        count = sequence.request.max_new_tokens if num_generated is None else num_generated
        sequence.tokens += [1] * count
        self.queue.leave(sequence)
        check_integrity(self.queue)


def drain(queue: WaitingQueue) -> list[LlmRequest]:
    order = []
    while (first := queue.first()) is not None:
        queue.remove(first)
        order.append(first)
        check_integrity(queue)
    return order


def named(waiting: dict[str, LlmRequest], names: str) -> list[LlmRequest]:
    return [waiting[name] for name in names]


# ---------------------------------------------------------------- priorities and the front


def test_higher_priorities_go_first_and_equal_ones_in_order_of_arrival():
    turns = Turns()
    priorities = (0.5, 1.0, 0.5, 0.0, 1.0)
    waiting = {name: turns.add(priority=priority) for name, priority in zip("abcde", priorities)}
    assert list(turns.queue.in_order()) == named(waiting, "beacd")
    assert drain(turns.queue) == named(waiting, "beacd")
    assert turns.queue.first() is None and len(turns.queue) == 0


def test_requests_put_in_front_precede_their_priority_and_follow_higher_ones():
    turns = Turns()
    waiting = {name: turns.add(priority=priority) for name, priority in zip("abcd", (0.5, 0.5, 1.0, 0.5))}
    for name in "db":  # they ran and are put in front, the last of them first
        turns.queue.remove(waiting[name])
        turns.queue.add_in_front(waiting[name])
    assert list(turns.queue.in_order()) == named(waiting, "cbda")
    assert [turns.queue.remove(waiting[name]) for name in "cbda"] == [False, True, True, False]


def test_a_request_that_is_not_queued_cannot_be_removed():
    turns = Turns()
    stranger = make_sequence(99)
    assert turns.queue.remove(stranger) is None
    turns.add()
    assert turns.queue.remove(stranger) is None and len(turns.queue) == 1


def test_skipped_requests_return_to_their_places():
    turns = Turns()
    waiting = {name: turns.add(client) for name, client in zip("abcd", (1, 1, 2, 1))}
    turns.queue.remove(waiting["d"])
    turns.queue.add_in_front(waiting["d"])
    passed = []
    for _ in range(3):
        first = turns.queue.first()
        passed.append((first, turns.queue.remove(first)))
    assert [sequence for sequence, _ in passed] == named(waiting, "dab")
    for sequence, was_in_front in reversed(passed):
        turns.queue.put_back(sequence, was_in_front)
        check_integrity(turns.queue)
    assert drain(turns.queue) == named(waiting, "dabc")


def test_num_new_counts_siblings_not_started_and_not_requests_put_in_front():
    turns = Turns()
    turns.add(priority=0.5, sampling=THREE_SEQUENCES)
    turns.add(priority=0.7, sampling=TWO_BEAMS)
    paused = turns.add(priority=0.9)
    assert [turns.queue.num_new(priority) for priority in (0.0, 0.5, 0.6, 0.7, 0.8, 1.0)] == [
        5,
        5,
        2,
        2,
        1,
        0,
    ]
    turns.queue.remove(paused)
    turns.queue.add_in_front(paused)
    assert [turns.queue.num_new(priority) for priority in (0.0, 0.8)] == [4, 0]
    assert len(turns.queue) == 3


# ---------------------------------------------------------------- clients


def test_clients_take_turns_and_their_own_requests_go_in_order():
    turns = Turns()
    for client in (1, 1, 1, 2, 2, 3):
        turns.add(client)
    assert [(s.request.client_id, s.key) for s in (turns.start() for _ in range(6))] == [
        (1, 1), (2, 4), (3, 6), (1, 2), (2, 5), (1, 3),
    ]  # fmt: skip


def test_shares_are_measured_in_tokens_and_not_in_requests():
    """A's requests cost 30 tokens each, B's 10."""
    turns = Turns()
    for _ in range(4):
        turns.add(1, prompt=10, new=20)
    for _ in range(12):
        turns.add(2, prompt=4, new=6)
    assert turns.starts(16) == "ABBBABBBABBBABBB"


def test_a_search_is_charged_for_all_its_beams():
    """A's search costs 4 + 2 * 8 tokens, as much as two requests of B."""
    turns = Turns()
    turns.add(1, prompt=4, new=8, sampling=TWO_BEAMS)
    turns.add(1)
    for _ in range(3):
        turns.add(2)
    assert turns.starts(5) == "ABBAB"


def test_a_sibling_costs_as_much_as_the_first_sequence():
    turns = Turns()
    turns.add(1, prompt=2, new=8, sampling=THREE_SEQUENCES)
    turns.add(1)
    for _ in range(4):
        turns.add(2)
    _, second, third = turns.start().group.sequences
    for sibling in (second, third):
        turns.queue.charge(sibling)
        sibling.start((1,), 0)
    assert turns.starts(5) == "BBBAB"


def test_a_sibling_that_leaves_before_it_starts_is_not_charged():
    turns = Turns()
    first, second, third = turns.add(1, sampling=THREE_SEQUENCES).group.sequences
    turns.start()
    turns.queue.leave(third)
    turns.queue.leave(second)
    check_integrity(turns.queue)
    turns.end(first)


def test_tokens_that_were_not_generated_are_credited_back():
    turns = Turns()
    turns.add(1, new=29)
    for client in (1, 1, 2, 2, 2):
        turns.add(client)
    first = turns.start()
    assert turns.starts(1) == "B"
    turns.end(first, num_generated=2)  # A has 3 tokens instead of 30, B 10
    assert turns.starts(4) == "ABAB"


def test_an_absent_client_accumulates_no_credit():
    turns = Turns()
    for _ in range(8):
        turns.add(1)
    assert turns.starts(4) == "AAAA"
    for _ in range(8):
        turns.add(2)
    assert turns.starts(12) == "BBBBABABABAB"  # B has as much running as A, and then they take turns


def test_a_client_with_few_requests_accumulates_no_credit():
    """A always has one running and no waiting request, while B's requests come and go."""
    turns = Turns()
    for _ in range(20):
        turns.add(2)
    stream = turns.add(1)
    while stream.state is RequestState.WAITING:
        started = turns.start()
        if started is not stream:
            turns.end(started)
    for _ in range(12):
        turns.end(turns.start())
    for _ in range(6):
        turns.add(1)
    assert turns.starts(8) == "BABABABA"


def test_a_new_client_does_not_wait_for_unused_charges_of_others():
    """Each request may generate 999 tokens and generates 3.

    B gets each free slot until it has half of them.
    """
    turns = Turns()
    for _ in range(40):
        turns.add(1, new=999)
    running = [turns.start() for _ in range(8)]
    for _ in range(20):
        turns.end(running.pop(0), num_generated=3)
        running.append(turns.start())
    for _ in range(20):
        turns.add(2, new=999)
    for _ in range(8):
        turns.end(running.pop(0), num_generated=3)
        running.append(turns.start())
    assert sorted(each.request.client_id for each in running) == [1] * 4 + [2] * 4


def test_a_client_with_one_request_at_a_time_keeps_its_charge():
    """A sends its next request, of 30 tokens, when the previous one has ended.

    B always has waiting requests.
    """
    turns = Turns()
    turns.add(1, new=29)
    for _ in range(12):
        turns.add(2)
    order = ""
    while len(order) < 13:
        first = turns.start()
        order += "-AB"[first.request.client_id]
        turns.end(first)
        if first.request.client_id == 1:
            turns.add(1, new=29)
    assert order == "ABBBBABBBABBB"


def test_shares_are_reset_when_the_queue_is_empty():
    turns = Turns()
    turns.add(1, new=99)
    turns.end(turns.start())
    for client in (1, 2, 1, 2):
        turns.add(client)
    assert turns.starts(4) == "ABAB"


def test_only_the_latest_clients_that_left_are_remembered():
    turns = Turns()
    resident = turns.add(0)
    for client in range(1, 1102):
        turns.add(client, new=19)
        turns.queue.remove(resident)  # out of the way for a moment
        turns.end(turns.start())
        turns.queue.put_back(resident, was_in_front=False)
    latest, first = turns.add(1101), turns.add(1)
    assert list(turns.queue.in_order()) == [resident, first, latest]


def test_the_cost_of_a_start_does_not_grow_with_the_number_of_priorities():
    queue, num_pushed = WaitingQueue(), 0
    push = queue._push_turn

    def counted(*args) -> None:
        nonlocal num_pushed
        num_pushed += 1
        push(*args)

    for key in range(500):
        queue.add(make_sequence(key, priority=key / 500))
    queue._push_turn = counted
    for _ in range(100):
        first = queue.first()
        queue.remove(first)
        queue.charge(first)
    check_integrity(queue)
    assert num_pushed <= 100 * waiting_queue._MAX_FOLLOWED


# ---------------------------------------------------------------- any order of calls


class Model:
    """A slow model of the queue."""

    def __init__(self) -> None:
        self.front: list[LlmRequest] = []
        self.others: list[LlmRequest] = []  # of one client in order
        self.settled: dict[int, int] = {}
        self.promised: Counter[int] = Counter()
        self.present: list[LlmRequest] = []
        self.virtual_time = 0

    def add(self, sequence: LlmRequest) -> None:
        client = sequence.request.client_id
        if not any(s.request.client_id == client for s in self.others):
            self.settled[client] = max(self.virtual_time, self.settled.get(client, 0))
        self.present.append(sequence)
        self.others.append(sequence)

    def in_order(self) -> list[LlmRequest]:
        """Return the order in which requests would start if no client was charged for a start."""
        heads: dict[tuple[float, int], LlmRequest] = {}
        for sequence in self.others:
            heads.setdefault((sequence.request.priority, sequence.request.client_id), sequence)

        def place(sequence: LlmRequest) -> tuple:
            priority, client = sequence.request.priority, sequence.request.client_id
            if sequence in self.front:
                return -priority, 0, self.front.index(sequence)
            served = self.settled[client] + self.promised[client]
            return -priority, 1, served, heads[priority, client].key, self.others.index(sequence)

        return sorted(self.front + self.others, key=place)

    def remove(self, sequence: LlmRequest) -> None:
        (self.front if sequence in self.front else self.others).remove(sequence)

    def charge(self, sequence: LlmRequest) -> None:
        client = sequence.request.client_id
        self.virtual_time = max(self.virtual_time, self.settled[client])
        self.promised[client] += sequence.max_length

    def leave(self, sequence: LlmRequest) -> None:
        if sequence.has_started:
            self.promised[sequence.request.client_id] -= sequence.max_length
            self.settled[sequence.request.client_id] += len(sequence.tokens)
        self.present.remove(sequence)
        if not self.present:
            self.settled.clear()


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "start", "start", "pause", "end", "give up", "pass over"]),
        st.integers(0, 3),
        st.integers(1, 40),
        st.sampled_from([0.0, 0.5, 0.5, 1.0]),
    ),
    max_size=80,
)


@pytest.mark.parametrize("most_followed", [1, 8])
@settings(deadline=None, derandomize=True)
@given(calls=CALLS)
def test_random_calls_agree_with_the_model(most_followed, calls):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting_queue, "_MAX_FOLLOWED", most_followed)
        check_calls(calls)


def check_calls(calls: list[tuple[str, int, int, float]]) -> None:
    queue, model = WaitingQueue(), Model()
    running: list[LlmRequest] = []
    for key, (call, number, new, priority) in enumerate(calls):
        if call == "add":
            sequence = make_sequence(key, prompt=3, new=new, client_id=number, priority=priority)
            queue.add(sequence)
            model.add(sequence)
        elif call == "start" and len(queue):
            running.append(start_first(queue, model))
        elif call == "pass over":
            pass_over(queue, count=min(number, len(queue)))
        elif call == "give up" and len(queue):
            end(queue, model, model.in_order()[number % len(queue)])
        elif call == "pause" and running:
            sequence = running.pop(number % len(running))
            sequence.pause()
            queue.add_in_front(sequence)
            model.front.insert(0, sequence)
        elif call == "end" and running:
            sequence = running.pop(number % len(running))
            sequence.tokens += [1] * (new % (sequence.max_length - len(sequence.tokens) + 1))
            end(queue, model, sequence)
        check_integrity(queue)
        assert [s.key for s in queue.in_order()] == [s.key for s in model.in_order()]
        assert queue.first() is next(iter(model.in_order()), None)
        assert queue.num_new(0.5) == sum(s.request.priority >= 0.5 for s in model.others)
        assert queue.num_new_at_all == len(model.others)
        assert set(queue.in_front()) == set(model.front)


def start_first(queue: WaitingQueue, model: Model) -> LlmRequest:
    first = queue.first()
    queue.remove(first)
    model.remove(first)
    if not first.has_started:
        queue.charge(first)
        model.charge(first)
    first.start((0,), 0)
    return first


def pass_over(queue: WaitingQueue, count: int) -> None:
    """Pass over the first request, which does not change the order of the queue or the model."""
    passed = []
    for _ in range(count):
        first = queue.first()
        passed.append((first, bool(queue.remove(first))))
    for first, was_in_front in reversed(passed):
        queue.put_back(first, was_in_front)


def end(queue: WaitingQueue, model: Model, sequence: LlmRequest) -> None:
    if queue.remove(sequence) is not None:
        model.remove(sequence)
    queue.leave(sequence)
    model.leave(sequence)


# ---------------------------------------------------------------- rebuilt after a failure


def test_a_rebuilt_queue_has_the_same_shares_and_order():
    turns = Turns()
    for client, priority in ((1, 0.5), (2, 0.5), (1, 0.9), (2, 0.5), (1, 0.5), (3, 0.1), (1, 0.5)):
        turns.add(client, new=5 + client, priority=priority)
    ran = [turns.start() for _ in range(3)]
    turns.end(ran[0], num_generated=2)
    accounts = {client: replace(account) for client, account in turns.queue._clients.items()}
    waiting = list(turns.queue.in_order())
    for sequence in ran[1:]:
        sequence.pause()
    # A failed `schedule` may leave an empty queue and a charge for a sequence that never started.
    turns.queue.charge(waiting[0])
    turns.queue._levels.clear()
    turns.queue.rebuild([*ran[1:], *waiting], in_front=[waiting[0]])
    check_integrity(turns.queue)
    first_client = waiting[0].request.client_id
    accounts[first_client].num_queued -= 1  # requests at the front are not queued as new
    assert turns.queue._clients == accounts
    expected = [waiting[0], *sorted(ran[1:], key=lambda sequence: sequence.key), *waiting[1:]]
    expected.sort(key=lambda sequence: -sequence.request.priority)
    assert [s.key for s in turns.queue.in_order()] == [s.key for s in expected]
    assert set(drain(turns.queue)) == set(expected)
