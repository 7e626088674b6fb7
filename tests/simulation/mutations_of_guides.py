"""Faults to plant in the source of the compiler of guides and of its process."""

from __future__ import annotations

from .mutations import Mutation

MUTATIONS_OF_GUIDES = (
    Mutation(
        "a process that has ended is used again",
        "guided.compiler",
        "            if not self._child.has_ended:\n",
        "            if True:\n",
    ),
    Mutation(
        "a guide that was interrupted is forgotten",
        "guided.compiler",
        "                self._slow.append(guide)\n",
        "                pass\n",
    ),
    Mutation(
        "a compiled guide does not wake the loop",
        "guided.compiler",
        "        if events:\n            self._notify()",
        "        pass",
    ),
    Mutation(
        "a guide that nobody waited for stays",
        "guided.compiler",
        "                del self._waiting[guide], self._origins[guide]\n",
        "                pass\n",
    ),
    Mutation(
        "the time to compile a guide has no limit",
        "guided.compiler",
        "            elif has_answered.wait(timeout_s - first_s):",
        "            elif has_answered.wait():",
    ),
    Mutation(
        "a slow guide is not interrupted for new ones",
        "guided.compiler",
        "            if not may_continue():",
        "            if False:",
    ),
    Mutation(
        "the loop waits while a guide compiles",
        "guided.compiler",
        "            answer = child.ask(",
        "            with self._lock:\n                answer = child.ask(",
    ),
    Mutation(
        "a guide whose process was killed is refused from then on",
        "guided.compiler",
        " and not isinstance(error, _OutOfBounds)",
        "",
    ),
    Mutation(
        "of the requests that wait for a guide one goes on",
        "guided.compiler",
        "for each in self._waiting.pop(guide)]",
        "for each in self._waiting.pop(guide)[:1]]",
    ),
    Mutation(
        "a guide in use is dropped",
        "guided.compiler",
        "            self._grammars.pin(guide)\n",
        "",
    ),
    Mutation(
        "half of an answer is taken for a whole one",
        "guided.child",
        "    return body if len(body) == length else None",
        "    return body",
    ),
    Mutation(
        "an invalid guide ends the process",
        "guided.child",
        "        except InflightError as error:",
        "        except OSError as error:",
    ),
)
"""The mistakes, each of which some seeds must reveal."""
