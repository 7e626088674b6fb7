"""The inputs of iterations: from the callbacks, or on a follower from the leader.

All input of an iteration that does not follow from earlier state, including the time, passes through this
module, so that the schedulers of all ranks make equal decisions. Called on the loop thread.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight.core.kv.block_store import StoreUpdate
from inflight.core.ports import (
    AdapterCache,
    BlockStore,
    GetInferenceRequestsCallback,
    GuideCompiler,
    PollStopSignalCallback,
    Ranks,
)
from inflight.core.request.adapter import AdapterEvent, AdapterUpdate
from inflight.core.request.guide import NO_GUIDES, GuideEvent
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.stop import StopSignal
from inflight.core.scheduler import Scheduler
from inflight.errors import Name, Unsupported

_NO_ADAPTERS = Unsupported(
    Name("lora_task_id"), ": this server keeps no LoRA adapters, so that no request can have one"
)


class OwnInputs:
    """The inputs of a loop with callbacks to clients; with several ranks they are shared with the others.

    `next` and `end` raise Unavailable once a rank is known to be lost.

    Args:
        scheduler: The scheduler, which knows the active requests.
        get_inference_requests, poll_stop_signal, clock_ns: See GptManager.
        ranks: The ranks, if there are several.
        guides: Compiles the guides of requests; None: requests with guides are refused.
        adapters: Finds or stores the adapters of requests; None: requests with adapters are refused.
        block_store: Saves and loads KV blocks; None: they are not saved.

    Attributes:
        are_over: Whether `next` has returned None; always False for these inputs.
        fetched: Requests that this rank must answer and that its scheduler has not accepted yet.
        now_ns: The clock of `IterationInput.now_ns`.
    """

    are_over = False

    def __init__(
        self,
        scheduler: Scheduler,
        get_inference_requests: GetInferenceRequestsCallback,
        poll_stop_signal: PollStopSignalCallback | None,
        clock_ns: Callable[[], int],
        ranks: Ranks | None,
        guides: GuideCompiler | None = None,
        adapters: AdapterCache | None = None,
        block_store: BlockStore | None = None,
    ) -> None:
        self.fetched: tuple[Request, ...] = ()
        self.now_ns = clock_ns
        self._scheduler = scheduler
        self._get_inference_requests = get_inference_requests
        self._poll_stop_signal = poll_stop_signal
        self._ranks = ranks
        self._guides = guides
        self._guided: set[int] = set()  # ids of the requests whose guides have been submitted
        self._adapters = adapters
        self._adapted: set[int] = set()  # ids of the requests whose adapters have been submitted
        self._block_store = block_store
        self._iteration = 0
        self._stops: tuple[StopSignal, ...] = ()

    def next(self) -> IterationInput:
        """Return the inputs of the next iteration.

        Other ranks get the inputs of iterations with active or new requests, or with changes of adapters or
        saved blocks.
        """
        requests = tuple(self._get_inference_requests(self._scheduler.room))
        is_active = self._scheduler.num_active > 0
        guides = self._guide_events(requests)
        adapters = self._adapter_update(requests)
        requests = tuple(request.without_weights() for request in requests)
        blocks = StoreUpdate() if self._block_store is None else self._block_store.update()
        inputs = IterationInput(
            self._iteration, self.now_ns(), requests, self._stops, guides, adapters, blocks
        )
        self._iteration += 1
        if self._ranks is not None and (is_active or requests or adapters or blocks):
            self.fetched = requests
            self._ranks.share(inputs, are_asleep=not is_active)
            self.fetched = ()
        return inputs

    def _guide_events(self, requests: tuple[Request, ...]) -> tuple[GuideEvent, ...]:
        guided = [
            (request.request_id, request.guide, request.origin)
            for request in self._to_be_accepted(requests)
            if request.guide is not None
        ]
        if self._guides is None:
            return tuple(
                GuideEvent(request_id, NO_GUIDES.kind, NO_GUIDES.marked) for request_id, *_ in guided
            )
        for request_id in [each for each in self._guided if not self._scheduler.is_active(each)]:
            self._guides.forget(request_id)
            self._guided.remove(request_id)
        for request_id, guide, origin in guided:
            self._guides.submit(request_id, guide, origin)
            self._guided.add(request_id)
        return self._guides.events()

    def _to_be_accepted(self, requests: tuple[Request, ...]) -> list[Request]:
        """Return the requests whose ids neither an active request nor an earlier one of `requests` has."""
        first: dict[int, Request] = {}
        for request in requests:
            if not self._scheduler.is_active(request.request_id):
                first.setdefault(request.request_id, request)
        return list(first.values())

    def _adapter_update(self, requests: tuple[Request, ...]) -> AdapterUpdate:
        """Return the adapter changes for the next iteration.

        There may be changes without requests, as an adapter may be unloaded.
        """
        adapted = [
            (request.request_id, request.lora, request.origin)
            for request in self._to_be_accepted(requests)
            if request.lora is not None
        ]
        if self._adapters is None:
            refused = (
                AdapterEvent(i, error_kind=_NO_ADAPTERS.kind, error=_NO_ADAPTERS.marked) for i, *_ in adapted
            )
            return AdapterUpdate(events=tuple(refused))
        for request_id in [each for each in self._adapted if not self._scheduler.is_active(each)]:
            self._adapters.forget(request_id)
            self._adapted.remove(request_id)
        for request_id, lora, origin in adapted:
            self._adapters.submit(request_id, lora, origin)
            self._adapted.add(request_id)
        return self._adapters.update()

    def look_ahead(self) -> bool:
        """Poll stop signals at the end of an iteration; return whether there is work for the next one.

        Signals for requests that are not active are dropped.
        """
        signals = self._poll_stop_signal() if self._poll_stop_signal else ()
        self._stops = tuple(signal for signal in signals if self._scheduler.is_active(signal.request_id))
        return bool(self._stops)

    def end(self) -> None:
        """Notify the other ranks that the loop has ended normally."""
        if self._ranks is not None:
            self._ranks.end(are_asleep=not self._scheduler.num_active)


class LeadersInputs:
    """The inputs of a follower's loop, which its leader shares, including the time.

    `next` raises Unavailable once a rank is known to be lost.

    Args:
        scheduler: The scheduler; if it has no active requests, the leader has to wake this rank.
        ranks: The ranks, including the leader.

    Attributes:
        are_over: Whether `next` has returned None.
        fetched: Always empty: a follower answers no requests.
    """

    fetched: tuple[Request, ...] = ()

    def __init__(self, scheduler: Scheduler, ranks: Ranks) -> None:
        self.are_over = False
        self._scheduler = scheduler
        self._ranks = ranks
        self._now_ns = 0

    def next(self) -> IterationInput | None:
        """Wait for the leader's inputs; None once the leader has ended."""
        if self.are_over:
            return None
        inputs = self._ranks.follow(is_asleep=not self._scheduler.num_active)
        if inputs is None:
            self.are_over = True
        else:
            self._now_ns = inputs.now_ns
        return inputs

    def now_ns(self) -> int:
        """Return the leader's time at the last iteration, as clocks of different machines differ."""
        return self._now_ns

    def look_ahead(self) -> bool:
        """Return True: only the leader knows whether there is work for the next iteration."""
        return True

    def end(self) -> None:
        """Do nothing, as a follower notifies no rank."""


Inputs = OwnInputs | LeadersInputs
