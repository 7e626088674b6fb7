"""Faults to plant in the source of Triton's front ends."""

from __future__ import annotations

from .mutations import Mutation

MUTATIONS_OF_TRITON = (
    Mutation(
        "the final flag is sent twice",
        "triton.responses",
        "            if self._finished:\n                return\n",
        "            pass\n",
    ),
    Mutation(
        "a finished request is asked whether its client is gone",
        "triton.responses",
        "return not self._finished and self._sender.is_cancelled()",
        "return self._sender.is_cancelled()",
    ),
    Mutation(
        "the last response lacks the final flag",
        "triton.responses",
        "            self._sender.send(response, flags=self._final_flag)",
        "            self._sender.send(response)",
    ),
    Mutation(
        "a request is refused without an answer",
        "triton.front_end",
        "            stream.fail(error)\n        except Exception as failure:",
        "            pass\n        except Exception as failure:",
    ),
    Mutation(
        "requests that are left at the end are not answered",
        "triton.front_end",
        "        self._close_client()\n",
        "",
    ),
    Mutation(
        "an ended request stays in flight",
        "serving.in_flight",
        "                if not entry.num_unfinished:\n                    self._forget(entry)",
        "                pass",
    ),
    Mutation(
        "a request is noted after its first response may have come",
        "serving.in_flight",
        "        with self._changed:\n            is_known = entry in self._entries",
        "        if True:\n            is_known = entry in self._entries",
    ),
    Mutation(
        "a response that could not be sent ends the sender",
        "serving.sender",
        "        except Exception as error:  # whatever the error, other clients",
        "        except ArithmeticError as error:  # whatever the error, other clients",
    ),
    Mutation(
        "an abandoned prompt's tokens are sent",
        "serving.sender",
        "        if entry.ending is not Ending.NONE:\n            stream.fail",
        "        if False:\n            stream.fail",
    ),
    Mutation(
        "requests of a lost front end seem to be cancelled",
        "endpoint.server",
        "        self._delivery.close()\n        self._disconnect()\n        with self._lock:\n"
        "            left = list(self._handles.values())\n        for handle in left:\n"
        "            handle.stop()\n",
        "        with self._lock:\n            left = list(self._handles.values())\n"
        "        for handle in left:\n            handle.stop()\n"
        "        self._delivery.close()\n        self._disconnect()\n",
        is_rare=True,
    ),
)
"""The mistakes, each of which some seeds must reveal."""
