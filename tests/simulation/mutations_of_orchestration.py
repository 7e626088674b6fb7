"""Faults to plant in the source of the orchestrator, which starts and supervises the ranks of an engine."""

from __future__ import annotations

from .mutations import Mutation

MUTATIONS_OF_ORCHESTRATION = (
    Mutation(
        "ranks that do not end in time are left",
        "ranks.orchestrator",
        "            self._launcher.signal(signal.SIGKILL)  # ranks end with their parent\n",
        "",
    ),
    Mutation(
        "the folder of lost ranks is left",
        "ranks.orchestrator",
        "        shutil.rmtree(self.processes.folder, ignore_errors=True)\n",
        "",
    ),
    Mutation(
        "ranks are not asked to end",
        "ranks.orchestrator",
        "            self._watch.retire(self._around.unload_timeout_s)\n",
        "            pass\n",
    ),
    Mutation(
        "ranks are started again without a pause",
        "ranks.orchestrator",
        "            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)\n",
        "",
    ),
    Mutation(
        "a start that fails is not tried again",
        "ranks.orchestrator",
        '                _log.error("the engine cannot be started: %s", error)\n                continue\n',
        "                return False\n",
    ),
    Mutation(
        "a silent engine counts as ended in order",
        "endpoint.supervision",
        '            return f"rank 0 has been silent for {self._timeout_s:g} s"',
        '            return ""',
    ),
    Mutation(
        "a lost engine that is to be handed over is not started again",
        "ranks.orchestrator",
        "                self._hand_over()\n                return\n",
        "                return\n",
    ),
)
"""The mistakes, each of which some seeds must reveal."""
