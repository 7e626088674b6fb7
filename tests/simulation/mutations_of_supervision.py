"""Faults to plant in the source of the supervision: launcher, guards, keeper and the process of /v1."""

from __future__ import annotations

from .mutations import Mutation

MUTATIONS_OF_SUPERVISION = (
    Mutation(
        "a keeper that is not needed any more is waited for",
        "server.keeper",
        "        self._process.kill()\n        self._process.wait()\n",
        "        self._process.stdin.close()\n        self._process.wait()\n",
    ),
    Mutation(
        "a keeper only asks the server to end",
        "server.keeper",
        "    runtime_directory.end_processes(folder)\n",
        "",
    ),
    Mutation(
        "a guard does not note that it ends the server",
        "server.guard",
        "    note_loss()\n    stubs",
        "    stubs",
    ),
    Mutation(
        "a guard only asks the server to end",
        "server.guard",
        "        process.signal(signal.SIGKILL)\n    if launcher",
        "        pass\n    if launcher",
    ),
    Mutation(
        "a guard counts the time in which it was stopped itself",
        "server.guard",
        "time.monotonic() - begun_s < _STOPPED * timeout_s",
        "True",
    ),
    Mutation(
        "a guard takes the process that adopted its model's for the server",
        "server.guard",
        "return parent if parent.pid == started_by else",
        "return parent if parent else",
    ),
    Mutation(
        "a silent model is not noticed",
        "server.guard",
        "            self.timeout_s = float(about)",
        "            pass",
    ),
    Mutation(
        "servers are started again without a pause",
        "server.supervisor",
        "        self._num_lost += 1\n",
        "",
    ),
    Mutation(
        "a signal does not end a wait",
        "server.supervisor",
        "        while not self.received and not until():",
        "        while not until():",
    ),
    Mutation(
        "a loss is taken for an end in order",
        "server.supervisor",
        "self._has_ended(server) and server.was_lost and",
        "self._has_ended(server) and server.returncode != 0 and",
    ),
    Mutation(
        "a second signal does not hurry",
        "server.supervisor",
        "server.shut_down(hurry=self._signals.several) or self",
        "server.shut_down() or self",
    ),
    Mutation(
        "a start that Ctrl-C ends exits with 0",
        "server.supervisor",
        "self.received == [signal.SIGINT] and not has_served",
        "False",
    ),
    Mutation(
        "orphans are not reaped",
        "server.orphans",
        "                os.waitpid(child.pid, os.WNOHANG)\n",
        "                pass\n",
    ),
    Mutation(
        "processes that others wait for are reaped",
        "server.orphans",
        "        _own.add(process)\n",
        "        pass\n",
    ),
    Mutation(
        "one start too many before giving up",
        "server.launch",
        "if num_failed >= most_tries or",
        "if num_failed > most_tries or",
    ),
    Mutation(
        "what is left of a lost server is not ended",
        "server.launch",
        "                self.kill()  # remaining stubs and ranks\n",
        "                pass\n",
    ),
    Mutation(
        "a server that hangs while it ends is waited for",
        "server.launch",
        "not (drained or hurry()) and time.monotonic() < deadline:",
        "not (drained or hurry()):",
    ),
    Mutation(
        "lost processes of /v1 are started again without a pause",
        "server.kept_process",
        "            num_lost += 1\n",
        "",
    ),
    Mutation(
        "a stopped process of /v1 is not killed",
        "server.kept_process",
        'and is killed")\n                process.kill()\n',
        'and is killed")\n',
    ),
    Mutation(
        "a stopped tritonserver is not killed",
        "server.supervisor",
        "                server.kill()\n",
        "",
    ),
    Mutation(
        "a process that cannot be started is not tried again",
        "server.kept_process",
        "                self.failure = None if self._was_up else loss",
        "                self.failure = loss",
    ),
    Mutation(
        "a process of /v1 that is stopped before it listens is not noticed",
        "server.kept_process",
        "        status = self._wait(process)\n        reading.join()\n",
        "        reading.join()\n        status = self._wait(process)\n",
    ),
    Mutation(
        "/v1 is started again while the server ends",
        "server.kept_process",
        "            self._ending.set()\n            if self._process is not None:\n"
        "                self._process.terminate()",
        "            if self._process is not None:\n                self._process.terminate()",
    ),
)
"""The mistakes, each of which some seeds must reveal."""
