"""The processor time of idle processes."""

from __future__ import annotations

import argparse
import subprocess
import sys

import psutil
import pytest

from benchmarks import idle


@pytest.mark.smoke
def test_every_process_has_its_processor_time() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        used = idle.processor_time(lambda: iter([psutil.Process(process.pid)]), 0.1)
        process.communicate(b"\n")
    (name,) = used
    assert name.endswith(f" {process.pid}")
    line = idle.report(argparse.Namespace(tp=1, seconds=0.5, model=None), {"a 1": 0.25, "b 2": 0.5})
    assert line["cores"] == 1.5 and line["processes_s"] == {"a 1": 0.25, "b 2": 0.5}
