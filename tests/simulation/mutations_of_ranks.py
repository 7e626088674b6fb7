"""Faults to plant in the source of lockstep, heartbeat and the loop of several ranks."""

from __future__ import annotations

from .mutations import Mutation

MUTATIONS_OF_RANKS = (
    Mutation(
        "a block that one rank could not read counts as loaded",
        "ranks.ranked_store",
        "LoadResult(result.load_id, min(counts))",
        "LoadResult(result.load_id, max(counts))",
    ),
    Mutation(
        "a load ends before it has ended on all ranks",
        "ranks.ranked_store",
        "if len(counts) == self._num_ranks:",
        "if len(counts) == self._num_ranks - 1:",
    ),
    Mutation(
        "the end of another rank's load does not wake rank 0",
        "ranks.ranked_store",
        "            self._heard.append(LoadResult(load_id, count))\n        self._notify()",
        "            self._heard.append(LoadResult(load_id, count))",
    ),
    Mutation(
        "the other ranks do not get changes of saved blocks without requests",
        "batch_manager.inputs",
        "(is_active or requests or adapters or blocks)",
        "(is_active or requests or adapters)",
    ),
    Mutation(
        "sleeping ranks are not woken",
        "ranks.lockstep",
        "        if are_asleep:\n            self._heartbeat.wake()\n",
        "",
    ),
    Mutation(
        "a silent rank is not lost",
        "ranks.failure_detector",
        "            if now_s - heard_s > self.patience_s:",
        "            if False:",
    ),
    Mutation(
        "a rank whose connection ended is not lost at once",
        "ranks.heartbeat",
        "            return None if end is None else Loss(rank, end)",
        "            return None",
    ),
    Mutation(
        "nobody handles a lost rank",
        "ranks.heartbeat",
        "            self._on_loss(error)\n",
        "            pass\n",
    ),
    Mutation(
        "a rank leaves without a goodbye",
        "ranks.heartbeat",
        "        if says_goodbye:\n",
        "        if False:\n",
    ),
    Mutation(
        "a goodbye is taken for a loss",
        "ranks.heartbeat",
        "                self._note_goodbye(rank)\n",
        "                pass\n",
        is_rare=True,
    ),
    Mutation(
        "iterations without new requests are not shared",
        "batch_manager.inputs",
        "(is_active or requests or adapters or blocks)",
        "(requests or adapters or blocks)",
    ),
    Mutation(
        "the end is not shared",
        "batch_manager.gpt_manager",
        "            self._inputs.end()\n",
        "            pass\n",
    ),
    Mutation(
        "a dead loop is not reported to the other ranks",
        "build",
        "            rank_context.report_dead_loop()\n",
        "            pass\n",
    ),
)
"""The mistakes, each of which some seeds must reveal."""
