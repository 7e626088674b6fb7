"""When a starting server is given up, and which lines are printed meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

from inflight.processes import ProcessId
from inflight.server.startup import Startup, num_bytes


class Starting:
    """A starting server with its log and its clock."""

    def __init__(self, stall_timeout_s: float | None = 60.0) -> None:
        self.num_lines = 0
        self.now_s = 1000.0
        self.num_bytes = 0
        self.said: list[str] = []
        self.startup = Startup(
            ("ensemble", "tensorrt_llm"),
            self,
            lambda: self.num_bytes,
            stall_timeout_s,
            self.said.append,
            lambda: self.now_s,
        )

    @property
    def loaded_models(self) -> set[str]:
        return {"ensemble"} if self.num_lines else set()

    def after(self, seconds: float, grows_by: int = 0) -> str | None:
        """Check ten times a second for `seconds`; return the first error, None without one."""
        for _ in range(int(10 * seconds)):
            self.now_s += 0.1
            self.num_bytes += grows_by // 10
            if (verdict := self.startup.check()) is not None:
                return verdict
        return None


def test_a_server_without_progress_is_given_up_after_the_timeout():
    starting = Starting()
    assert starting.after(59) is None
    verdict = starting.after(10)
    assert verdict == (
        "not ready, and no progress in 60 s (--ready-timeout): waiting for ensemble, tensorrt_llm to be "
        "loaded, for 60 s; the last progress was 60 s ago"
    )


def test_a_log_line_is_progress_and_names_loaded_models():
    starting = Starting()
    assert starting.after(50) is None
    starting.num_lines += 1
    assert starting.after(59) is None
    verdict = starting.after(10)
    assert verdict is not None and "waiting for tensorrt_llm to be loaded" in verdict


def test_reading_a_large_checkpoint_is_progress_however_long_it_takes():
    starting = Starting()
    assert starting.after(3600, grows_by=2_000_000) is None
    assert starting.after(70) is not None


def test_answering_probes_is_not_progress():
    starting = Starting()
    assert starting.after(70, grows_by=100_000) is not None


def test_a_slow_start_without_a_timeout_is_only_reported():
    starting = Starting(None)
    assert starting.after(300) is None
    assert 9 <= len(starting.said) <= 10
    assert starting.said[0].startswith(
        "not ready yet: waiting for ensemble, tensorrt_llm to be loaded, for 30 s"
    )


def test_bytes_of_a_process_count_reads_and_filled_memory(tmp_path):
    (tmp_path / "file").write_bytes(bytes(20_000_000))
    program = (
        "import sys; sys.stdin.readline(); data = open(sys.argv[1], 'rb').read() if sys.argv[2] == 'read' else "
        "b'x' * 20_000_000; print('done', flush=True); sys.stdin.readline()"
    )
    for what in ("read", "fill"):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "file"), what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            identity = ProcessId.of(process.pid)
            assert identity is not None
            before = num_bytes([identity])
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            # Memory may come in huge pages, each of which counts as one small page.
            assert num_bytes([identity]) - before > (19_000_000 if what == "read" else 4096)
            process.stdin.write("\n")
    assert num_bytes([identity]) == 0 and os.getpid() != process.pid
