"""What the rank that chooses tokens keeps of guides: for each a matcher at its beginning, to be forked."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from inflight.core.request.guide import Guide
from inflight.errors import InvalidArgument
from inflight.guided.backend import GuideBackend, MaskJob, Matcher
from inflight.guided.vocabulary import GuideVocabulary

_MOST_KEPT = 256


class Grammars:
    """Matchers of guides, by a backend. The latest used guides are kept.

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
        self._lock = threading.Lock()

    def add(self, guide: Guide, compiled: bytes) -> None:
        """Keep what another process has compiled; any thread. Raises InvalidArgument as `GuideBackend.load`."""
        matcher = self._backend.load(guide, compiled)
        with self._lock:
            self._kept[guide] = matcher
            self._kept.move_to_end(guide)
            while len(self._kept) > self._most_kept:
                self._kept.popitem(last=False)

    def __contains__(self, guide: Guide) -> bool:
        """Whether a guide is kept, and so can be followed at once; then it counts as used. Any thread."""
        with self._lock:
            if guide in self._kept:
                self._kept.move_to_end(guide)
            return guide in self._kept

    def matcher(self, guide: Guide) -> Matcher:
        """A new matcher at the beginning of a guide.

        One that is not kept, because there were many others since, or because another rank had it compiled, is
        compiled here: it has been proved to be possible in bounded time. Raises InvalidArgument as `add`.
        """
        with self._lock:
            kept = self._kept.get(guide)
        if kept is None:
            self.add(guide, self._backend.compile(guide))
            return self.matcher(guide)
        return kept.fork()

    def fill(self, jobs: Sequence[MaskJob], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        """As `GuideBackend.fill`."""
        return self._backend.fill(jobs, masks) if jobs else {}
