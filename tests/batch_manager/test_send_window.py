"""Sending between iterations: when the loop hands responses over, and how long it waits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from inflight.batch_manager.send_window import SendWindow
from inflight.core.request.response import Response

MS = 1_000_000


class Host:
    """A clock, and a sender that merges each request's responses and takes some time for each request."""

    def __init__(self, send_ns: int) -> None:
        self.now_ns = 0
        self.send_ns = send_ns
        self.handed_over: list[tuple[int, list[int]]] = []
        self.waited_ns: list[int] = []
        self._unsent: set[int] = set()
        self.window = SendWindow(self._take, self._wait, lambda: self.now_ns)

    def _take(self, responses: Sequence[Response]) -> None:
        self.handed_over.append((self.now_ns, [response.request_id for response in responses]))
        self._unsent.update(response.request_id for response in responses)

    def _wait(self, timeout_s: float) -> bool:
        needed, room = len(self._unsent) * self.send_ns, int(1e9 * timeout_s)
        waited = min(needed, room)
        self.waited_ns.append(waited)
        self.now_ns += waited
        self._unsent.clear()
        return needed <= room

    def iterate(self, step_ns: int, *request_ids: int, is_final: bool = False) -> None:
        self.now_ns += step_ns
        self.window.add([Response(request_id, is_final=is_final) for request_id in request_ids])


def interval(host: Host, num_streams: int, step_ns: int, num_iterations: int = 200) -> float:
    """Return the number of tokens per response, once the cost of a response is known."""
    for _ in range(num_iterations):
        host.iterate(step_ns, *range(num_streams))
    late = host.handed_over[len(host.handed_over) // 2 :]  # one for each stream and window
    return sum(len(ids) for _, ids in late) / len(late)


def test_few_streams_are_sent_every_iteration_and_many_every_few_iterations() -> None:
    assert interval(Host(400_000), 1, 9 * MS) == 1
    assert interval(Host(400_000), 8, 16 * MS) == 1
    assert interval(Host(400_000), 16, 16 * MS) == 2
    assert interval(Host(400_000), 16, 100 * MS) == 1
    assert interval(Host(10_000), 64, 16 * MS) == 1


def test_the_loop_waits_for_at_most_a_part_of_the_time() -> None:
    for send_ns in (100_000, 400_000, 5 * MS):
        host = Host(send_ns)
        interval(host, 16, 10 * MS)
        assert sum(host.waited_ns) <= 0.3 * (host.now_ns - sum(host.waited_ns))


def test_held_responses_of_a_request_are_sent_in_order_and_none_is_lost() -> None:
    host = Host(400_000)
    for number in range(300):
        host.iterate(5 * MS, *range(16))
        host.iterate(5 * MS, 1000 + number, is_final=True)
    host.window.flush()
    gone = [request_id for _, ids in host.handed_over for request_id in ids]
    assert all(gone.count(request_id) == 300 for request_id in range(16))
    assert [each for each in gone if each >= 1000] == [1000 + number for number in range(300)]


def test_a_final_response_is_sent_at_once_with_the_held_responses_of_its_request() -> None:
    host = Host(400_000)
    interval(host, 16, 5 * MS)
    host.window.flush()
    host.iterate(MS, *range(16))
    count = len(host.handed_over)
    host.iterate(MS, 3, is_final=True)
    assert [ids for _, ids in host.handed_over[count:]] == [[3, 3]]
    host.window.flush()
    assert [ids for _, ids in host.handed_over[count + 1 :]] == [[each] for each in range(16) if each != 3]


def test_no_response_is_held_longer_than_a_fifth_of_a_second() -> None:
    host = Host(500 * MS)  # senders that hang
    interval(host, 64, 10 * MS)
    times = [when for when, _ in host.handed_over]
    assert max(later - earlier for earlier, later in pairwise(times)) <= 280 * MS


def test_senders_that_hung_for_a_while_have_no_lasting_effect() -> None:
    host = Host(500 * MS)
    interval(host, 16, 20 * MS, num_iterations=3000)
    host.send_ns = 300_000
    host.iterate(20 * MS, 1)
    host.iterate(200 * MS, 1)
    count = len(host.handed_over)
    for _ in range(10):
        host.iterate(20 * MS, 1)
    assert len(host.handed_over) - count == 10, "a lone stream gets every token at once again"


def test_iterations_without_responses_do_not_count_as_windows() -> None:
    host = Host(400_000)
    host.iterate(MS)
    assert host.handed_over == [] and host.waited_ns == []
