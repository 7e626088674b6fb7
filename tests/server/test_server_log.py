"""The server's log, and the causes of failures found in it."""

import io
import logging
import re

import pytest

from inflight.log_lines import LineFormatter
from inflight.server import descriptors
from inflight.server.log import CollapsingHandler, Quiet, Repeats, ServerLog, find_cause, was_starved

FAILED = r"""I1121 07:32:04.136206 3786 model_lifecycle.cc:472] "loading: m:1"
hello from the model
E1121 07:32:05.438735 3786 backend_model.cc:692] "ERROR: Failed to create instance: ValueError: no"
E1121 07:32:05.438736 3786 lifecycle.cc:642] "failed to load 'm' version 1: ValueError: no\n\nAt:\n  model.py(3)\n"
I1121 07:32:05.547399 3786 server.cc:604] "table"
E1121 07:32:05.600000 3786 main.cc:11] "error: creating server"
more of it
"""
ABORTED = """I1121 07:32:04.136206 3786 model_lifecycle.cc:472] "loading: m:1"
terminate called after throwing an instance of 'boost::interprocess::lock_exception'
  what():  boost::interprocess::lock_exception
"""
UNHEALTHY = FAILED.replace("ValueError: no", "Internal: Stub process 'm_0_0' is not healthy.")
GUARD = (
    "E1121 07:32:05.438735 77 guard.py] the process of the model tensorrt_llm has ended: the server ends\n"
)
FRONT_END_GUARD = GUARD.replace("tensorrt_llm", "preprocessing")
DRAFT_GUARD = GUARD.replace("tensorrt_llm", "tensorrt_llm_draft")
DRIVER_LINE = 'E1121 07:32:04.135175 3786 server.cc:241] "CudaDriverHelper has not been initialized."\n'


def test_the_error_that_kept_a_model_from_loading_is_reported() -> None:
    lines = find_cause(FAILED).splitlines()
    assert len(lines) == 4
    assert "failed to load 'm' version 1: ValueError: no" in lines[0]
    assert lines[2] == "  model.py(3)"


def test_the_cause_of_a_wrong_configuration_has_no_stack() -> None:
    wrong = FAILED.replace("ValueError: no", "ConfigError: 3 does not divide 4")
    (line,) = find_cause(wrong).splitlines()
    assert line.endswith("failed to load 'm' version 1: ConfigError: 3 does not divide 4\"")


def test_the_cause_is_all_errors_with_their_further_lines() -> None:
    lines = find_cause(FAILED.replace("failed to load", "x")).splitlines()
    assert "Failed to create instance" in lines[0]
    assert lines[-1] == "more of it"
    assert not any("table" in line or "loading" in line for line in lines)


def test_without_errors_the_cause_is_the_end_of_the_log() -> None:
    assert find_cause("one\ntwo\nthree\n", most_lines=2) == "two\nthree"
    assert find_cause("") == ""


def test_log_lines_are_kept_and_copied_to_the_output() -> None:
    echo = io.StringIO()
    log = ServerLog(io.BytesIO(b"one\n\xff two\nthree"), echo, has_gpu=False)
    log.join(60)
    assert log.text() == "one\n\ufffd two\nthree"
    assert echo.getvalue() == log.text()


def test_messages_about_a_missing_gpu_are_left_out_without_a_gpu() -> None:
    for has_gpu, expected in ((True, DRIVER_LINE + "x\n"), (False, "x\n")):
        log = ServerLog(io.BytesIO(DRIVER_LINE.encode() + b"x\n"), None, has_gpu)
        log.join(60)
        assert log.text() == expected


def test_a_closed_output_does_not_stop_the_log() -> None:
    echo = io.StringIO()
    echo.close()
    log = ServerLog(io.BytesIO(b"one\ntwo\n"), echo, has_gpu=True)
    log.join(60)
    assert log.text() == "one\ntwo\n"


@pytest.mark.parametrize(
    ("log", "starved"),
    [(ABORTED, True), (UNHEALTHY, True), (FAILED, False), (FAILED + ABORTED, False), (GUARD + ABORTED, False)]
    + [(FRONT_END_GUARD, True), (ABORTED + FRONT_END_GUARD, True), (FAILED + FRONT_END_GUARD, False)]
    + [(GUARD, False), (DRAFT_GUARD, False), (GUARD + FRONT_END_GUARD, False)]
    + [("", False), ("all is well\n", False)],
)
def test_a_start_counts_as_starved_only_without_another_error(log: str, starved: bool) -> None:
    assert was_starved(log, {"tensorrt_llm", "tensorrt_llm_draft"}) is starved


def test_running_out_of_descriptors_is_explained_once() -> None:
    echo = io.StringIO()
    line = "[warn] Error from accept() call: Too many open files\n"
    log = ServerLog(io.BytesIO(3 * line.encode()), echo, has_gpu=True)
    log.join(60)
    assert echo.getvalue() == f"{line}serve: {descriptors.explanation()}\n{line}{line}"


def record(text: str, second: int) -> str:
    return f"E1126 01:25:{second:02}.123456 4711 server.cc:17] {text}\n"


def test_repeated_lines_are_counted_and_no_other_line_is_lost() -> None:
    now = 0.0
    repeats = Repeats(lambda: now)
    told: list[str] = []
    for second in range(25):
        now = float(second)
        for _ in range(1000):
            told += repeats.add(record("Too many open files", second))
        told += repeats.add(record(f"other {second}", second))
    told += repeats.end()
    repeated = [line for line in told if line.startswith("E") and "Too many open files" in line]
    counted = [line for line in told if line.startswith("serve: ")]
    assert len(repeated) == 60 and len([line for line in told if "other" in line]) == 25
    counts = [int(line.split()[1]) for line in counted]
    assert sum(counts) + len(repeated) == 25_000
    assert counted[0] == f"serve: {counts[0]} times more in 10 s: server.cc:17] Too many open files\n"


def test_different_lines_are_all_copied() -> None:
    repeats = Repeats(lambda: 0.0)
    lines = [f"line {each}\n" for each in range(5000)] + ["+----+\n"] * 20
    assert [told for line in lines for told in repeats.add(line)] + repeats.end() == lines


def test_the_number_of_repeated_lines_is_reported_at_the_end() -> None:
    lines = record("again", 0).encode() * 1000
    log = ServerLog(io.BytesIO(lines), None, has_gpu=True)
    log.join(60)
    assert log.text().endswith("s: server.cc:17] again\n") and log.num_lines < 30


def test_repeated_records_of_this_process_are_counted() -> None:
    stream = io.StringIO()
    handler = CollapsingHandler(stream)
    handler.setFormatter(LineFormatter("engine"))
    error = {"msg": "again", "levelno": logging.ERROR}
    for number in range(30):
        handler.handle(logging.makeLogRecord(error))
        handler.handle(logging.makeLogRecord({**error, "msg": "failed", "request_id": f"id-{number}"}))
    lines = stream.getvalue().splitlines()
    assert len([line for line in lines if line.startswith("E") and line.endswith("engine] again")]) == 20
    assert [line.split("request_id=")[1] for line in lines if "failed" in line] == [
        f"id-{number}" for number in range(30)
    ]


def test_stacks_and_verbose_logs_are_copied_completely() -> None:
    repeats = Repeats(lambda: 0.0)
    lines = [record("a stack", 1), *["  in wait\n"] * 30]
    assert [told for line in lines for told in repeats.add(line)] + repeats.end() == lines
    verbose = ServerLog(io.BytesIO(record("again", 0).encode() * 1000), None, has_gpu=True, is_verbose=True)
    verbose.join(60)
    assert verbose.num_lines == 1000


def test_loaded_models_are_remembered_in_a_long_log() -> None:
    line = b"""I1122 12:00:00.000001 1 model_lifecycle.cc:839] "successfully loaded 'ensemble'"\n"""
    log = ServerLog(io.BytesIO(line + b"and on\n" * 30_000), None, has_gpu=False)
    log.join(60)
    assert "successfully loaded" not in log.text()
    assert log.loaded_models == {"ensemble"}


START = """I1127 11:49:05.930049 8790 server.cc:604]
+------------------+------+
| Repository Agent | Path |
+------------------+------+

I1127 11:49:05.930101 8790 python_be.cc:1840] "Forcing CPU only input tensors."
Signal (15) received.
I1127 11:49:05.930101 8790 host.py:175] "2 threads on the CPU"
W1127 11:49:05.930101 8790 http_server.cc:362] "restricted"
"""


def test_what_tritonserver_itself_tells_is_kept_and_not_shown() -> None:
    echo, everything = io.StringIO(), io.StringIO()
    log = ServerLog(io.BytesIO(START.encode()), echo, has_gpu=True)
    log.join(60)
    assert log.text() == START and log.num_lines == len(START.splitlines())
    assert echo.getvalue() == "".join(
        line for line in START.splitlines(True) if re.search("Signal|host.py|restricted", line)
    )
    verbose = ServerLog(io.BytesIO(START.encode()), everything, has_gpu=True, is_verbose=True)
    verbose.join(60)
    assert everything.getvalue() == START


def test_a_warning_of_every_model_is_shown_once_while_a_server_starts() -> None:
    quiet = Quiet(is_starting=True)
    warnings = [f'W1127 11:49:0{n}.930101 8790 host.py:175] "text will be refused"\n' for n in range(4)]
    other = 'W1127 11:49:05.930101 8790 host.py:175] "no guides"\n'
    error = 'E1127 11:49:05.930101 8790 host.py:175] "failed"\n'
    lines = [*warnings, other, error, error]
    assert [line for line in lines if quiet.lets_pass(line)] == [warnings[0], other, error, error]
    quiet.is_starting = False
    assert all(map(quiet.lets_pass, warnings))


def test_access_lines_are_never_counted_together() -> None:
    line = "I1127 11:49:05.930101 8790 access] request_id=a\n"
    repeats = Repeats(lambda: 0.0)
    assert [told for _ in range(100) for told in repeats.add(line)] == [line] * 100
