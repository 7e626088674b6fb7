"""Faults to plant whose consequences are over before the end: only checks after each step can find them."""

from __future__ import annotations

from .mutations import Mutation

MUTATIONS_OF_STEPS = (
    Mutation(
        "an ended sequence keeps its blocks until the next one ends",
        "core.schedule.running",
        "        self._kv_cache.release(llm_request.key)\n        self.adapter",
        "        late = self.__dict__.setdefault('late', [])\n"
        "        late.append(llm_request.key)\n"
        "        most = 1 if llm_request.state.name == 'FINISHED' and self.sequences else 0\n"
        "        while len(late) > most:\n"
        "            self._kv_cache.release(late.pop(0))\n"
        "        self.adapter",
    ),
    Mutation(
        "written blocks are counted as waiting",
        "block_store.store",
        "                self._waiting_bytes -= save.content.size\n",
        "                pass\n",
    ),
    Mutation(
        "removed blocks stay counted in host memory",
        "block_store.store",
        "            self._host.dropped.add(content.size)\n",
        "            pass\n",
    ),
    Mutation(
        "removed files stay counted",
        "block_store.files",
        "            self.counts.dropped.add(file.size)\n",
        "            pass\n",
    ),
    Mutation(
        "loaded blocks are counted before their load has ended",
        "block_store.store",
        "            tiers.append(tier)\n",
        "            tiers.append(tier)\n            tier.loaded.add(0)\n",
    ),
    Mutation(
        "a file that is read again counts as saved",
        "block_store.files",
        "            self._files.move_to_end(key)\n",
        "            self._files.move_to_end(key)\n            self.counts.saved.add(0)\n",
    ),
    Mutation(
        "the loop rests although a request is to stop",
        "batch_manager.inputs",
        "        return bool(self._stops)",
        "        return False",
    ),
    Mutation(
        "a stop does not wake the loop",
        "endpoint.local",
        "            else:\n                return\n        self._notify()",
        "            else:\n                return",
    ),
    Mutation(
        "a failed request is not counted",
        "core.report.metrics",
        "            self.refused(group.error)\n            return",
        "            return",
    ),
    Mutation(
        "a request that is refused is counted twice",
        "core.scheduler",
        "                self._observed.refused(refusal)\n",
        "                self._observed.refused(refusal)\n                self._observed.refused(refusal)\n",
    ),
    Mutation(
        "requests that wait for adapters do not count in a full queue",
        "core.schedule.admission",
        "        held = [group.request for group in self.held.values()]",
        "        held: list[Request] = []",
        is_rare=True,
    ),
    Mutation(
        "an adapter that is unloaded does not wake the loop",
        "adapters.cache",
        "                self._drop(entry)\n        self._notify()",
        "                self._drop(entry)",
    ),
    Mutation(
        "requests beyond max_num_requests are accepted",
        "core.scheduler",
        "max(0, bound - len(self._groups))",
        "bound",
    ),
    Mutation(
        "stored weights stay counted as waiting",
        "adapters.waiting_weights",
        "            self._num_bytes -= self._sizes.pop(request_id, 0)",
        "            self._sizes.pop(request_id, 0)",
    ),
)
"""The mistakes, each of which some seeds must reveal."""
