"""What the rank that chooses tokens keeps of guides: for each a matcher at its beginning, to be forked."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from inflight.core.request.guide import Guide
from inflight.errors import InvalidArgument
from inflight.guided.backend import GuideBackend, MaskJob, Matcher
from inflight.guided.vocabulary import GuideVocabulary

_MOST_KEPT = 256


class Grammars:
    """Matchers of guides, by a backend. Pinned guides are kept, and the latest used of the others.

    Attributes:
        vocabulary: Of the masks.
    """

    def __init__(
        self, backend: GuideBackend, vocabulary: GuideVocabulary, most_kept: int = _MOST_KEPT
    ) -> None:
        self.vocabulary = vocabulary
        self._backend = backend
        self._most_kept = most_kept
        self._kept: OrderedDict[Guide, Matcher] = OrderedDict()
        self._pins: Counter[Guide] = Counter()
        self._lock = threading.Lock()

    def add(self, guide: Guide, compiled: bytes) -> None:
        """Keep what another process has compiled; any thread. Raises InvalidArgument as `GuideBackend.load`."""
        matcher = self._backend.load(guide, compiled)
        with self._lock:
            self._kept[guide] = matcher
            self._kept.move_to_end(guide)
            self._drop_oldest()

    def pin(self, guide: Guide) -> None:
        """Keep a guide, now or when it is added, until each of its pins is taken out. Any thread."""
        with self._lock:
            self._pins[guide] += 1

    def unpin(self, guide: Guide) -> None:
        """Take out a pin. Any thread."""
        with self._lock:
            self._pins[guide] -= 1
            if not self._pins[guide]:
                del self._pins[guide]
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Forget the guides used longest ago, except pinned ones, down to what is kept."""
        excess = len(self._kept) - self._most_kept
        if excess > 0:
            loose = (guide for guide in self._kept if guide not in self._pins)
            for guide in list(islice(loose, excess)):
                del self._kept[guide]

    def __contains__(self, guide: Guide) -> bool:
        """Whether a guide is kept, and so can be followed at once; then it counts as used. Any thread."""
        with self._lock:
            if guide in self._kept:
                self._kept.move_to_end(guide)
            return guide in self._kept

    def matcher(self, guide: Guide) -> Matcher:
        """A new matcher at the beginning of a guide.

        One that is not kept, because another rank had it compiled, is compiled here: it has been proved to be
        possible in bounded time. Raises InvalidArgument as `add`.
        """
        with self._lock:
            kept = self._kept.get(guide)
        if kept is None:
            compiled = self._backend.compile(guide)
            self.add(guide, compiled)
            return self._backend.load(guide, compiled)
        return kept.fork()

    def fill(self, jobs: Sequence[MaskJob], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        """As `GuideBackend.fill`."""
        return self._backend.fill(jobs, masks) if jobs else {}
