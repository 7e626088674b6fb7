"""Recorded exports of AIPerf and genai-perf are read, and both tools run where they are installed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.aiperf import AiperfOnV1, make_input
from benchmarks.genai_perf import GenaiPerf, make_prompts
from benchmarks.load_testing import environment
from benchmarks.load_testing.comparison import (
    LoadFigures,
    TritonGrpc,
    num_requests,
    options,
    parser,
    run_tool,
)
from benchmarks.load_testing.environment import find_program, require_program
from benchmarks.load_testing.exports import read_aiperf, read_genai_perf
from benchmarks.measuring.report import Timeline
from benchmarks.measuring.workload import BenchRequest, draw
from inflight.models import read_model_description
from inflight.server.client_apis import ClientApis
from inflight.server.errors import ServeError
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.ports import Ports
from inflight.server.repository import default_repository
from inflight.text.tokenizer import Tokenizer

RECORDED = Path(__file__).parent / "recorded"
DEMO = default_repository() / "tensorrt_llm" / "1" / "demo_model"
# The requests of the recorded AIPerf run.
ASKED = [BenchRequest(tuple(range(10, 30 + index)), 10 + index) for index in range(3)]


def aiperf_lines() -> list[str]:
    return (RECORDED / "aiperf.jsonl").read_text().splitlines()


def changed(line: str, **metadata: object) -> str:
    record = json.loads(line)
    record["metadata"].update(metadata)
    return json.dumps(record)


def test_aiperfs_records_become_timelines():
    lines = aiperf_lines()
    timelines = read_aiperf(lines, ASKED)
    for line, timeline, request in zip(lines, timelines, ASKED, strict=True):
        metrics = json.loads(line)["metrics"]
        assert len(timeline.responses_ns) == timeline.num_output_tokens == request.num_output_tokens
        assert timeline.num_prompt_tokens == metrics["usage_prompt_tokens"]["value"]
        assert timeline.ttft_ms == pytest.approx(metrics["time_to_first_token"]["value"])
        # AIPerf's own definitions agree: one figure is a mean of gaps, the other the whole time.
        mean_gap = sum(timeline.gaps_ms) / len(timeline.gaps_ms)
        assert mean_gap == pytest.approx(metrics["inter_token_latency"]["value"], rel=1e-3)
        whole = timeline.ttft_ms + sum(timeline.gaps_ms)
        assert whole == pytest.approx(metrics["request_latency"]["value"], rel=1e-3)


def test_aiperfs_warm_up_is_not_counted():
    lines = aiperf_lines()
    warm_up = changed(lines[0], benchmark_phase="warmup")
    assert read_aiperf([warm_up, *lines], ASKED) == read_aiperf(lines, ASKED)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (lambda lines: lines[:2], "was to send 3 requests once; it sent 2"),
        (lambda lines: [*lines[:2], lines[1]], "was to send 3 requests once; it sent 3"),
        (lambda lines: [changed(lines[0], conversation_id="1"), changed(lines[1], conversation_id="0"), lines[2]],
         "given"),
        (lambda lines: [json.dumps({**json.loads(lines[0]), "error": {"code": 400}}), *lines[1:]], "failed.*400"),
    ],
    ids=["one is missing", "one twice", "other numbers of tokens", "an error"],
)  # fmt: skip
def test_a_run_of_aiperf_that_differs_from_its_requests_is_refused(lines, says):
    with pytest.raises(ServeError, match=says):
        read_aiperf(lines(aiperf_lines()), ASKED)


def genai_export(name: str) -> tuple[str, dict[str, BenchRequest]]:
    text = (RECORDED / f"genai_perf_{name}.json").read_text()
    prompts = json.loads((RECORDED / "genai_perf_prompts.json").read_text())
    return text, {prompt: BenchRequest((1, 2, 3), 8) for prompt in prompts}


@pytest.mark.parametrize("name", ["v1", "triton"])
def test_genai_perfs_records_become_timelines(name: str):
    text, requests = genai_export(name)
    timelines = read_genai_perf(text, requests)
    records = json.loads(text)["experiments"][0]["requests"]
    assert len(timelines) == len(records) == len(requests)
    for record, timeline in zip(records, timelines, strict=True):
        assert timeline.num_output_tokens == 8 and 1 <= len(timeline.responses_ns) <= 8
        assert timeline.sent_ns == record["timestamp"]
        assert set(timeline.responses_ns) <= set(record["response_timestamps"])
    if name == "v1":  # the last event is [DONE], which has no token
        assert all(len(t.responses_ns) < len(r["response_timestamps"]) for t, r in zip(timelines, records))


def test_other_finish_reasons_and_incomplete_exports_are_refused():
    text, requests = genai_export("v1")
    with pytest.raises(ServeError, match=r"ended with .'stop'"):
        read_genai_perf(text.replace('"length', '"stop').replace('\\"length', '\\"stop'), requests)
    with pytest.raises(ServeError, match="not JSON"):
        read_genai_perf(text[:-30], requests)


def test_an_error_in_a_stream_is_reported():
    event = 'data: {"error": {"message": "the queue is full"}}\n\n'
    record = {
        "timestamp": 1,
        "request_inputs": {"payload": json.dumps({"prompt": ["a"]})},
        "response_timestamps": [2],
        "response_outputs": [{"response": event}],
    }
    text = json.dumps({"experiments": [{"requests": [record]}]})
    with pytest.raises(ServeError, match="the queue is full"):
        read_genai_perf(text, {"a": BenchRequest((1,), 8)})


@pytest.mark.smoke
def test_genai_perfs_default_prompts_fit_the_demo_model():
    given = parser("genai-perf", "What it is for.").parse_args(["--model", str(DEMO)])
    count = num_requests(given.requests, max(given.streams))
    prompts = make_prompts(Tokenizer.from_dir(DEMO), count, 64)
    assert len(prompts) == len(set(prompts.values())) == 256
    longest = read_model_description(DEMO).decoder.max_positions
    assert max(request.num_tokens for request in prompts) < longest
    for request, drawn in zip(prompts, draw("w", 1000, count), strict=True):
        assert len(request.prompt) == pytest.approx(len(drawn.prompt), rel=0.25)


@pytest.mark.smoke
def test_figures_are_computed_from_timelines():
    timelines = [
        Timeline(5, 3, 0, (10_000_000, 12_000_000, 14_000_000)),
        Timeline(5, 4, 5_000_000, (25_000_000, 105_000_000)),
    ]
    figures = LoadFigures.of(timelines)
    assert figures.output_tokens_per_s == pytest.approx(7 / 0.105)
    assert figures.tokens_per_response == 7 / 5
    assert (figures.ttft_ms.p50, figures.ttft_ms.p99) == pytest.approx((15, 20))
    assert (figures.itl_ms.p50, figures.itl_ms.p99) == pytest.approx((2, 80))
    assert figures.tpot_ms.p99 == pytest.approx(80 / 3) and figures.tpot_ms.p50 == pytest.approx(
        (2 + 80 / 3) / 2
    )


def test_the_number_of_requests_depends_on_the_streams():
    assert [num_requests(None, streams) for streams in (1, 4, 16, 64)] == [16, 16, 64, 256]
    assert num_requests(5, 64) == 5


def test_inputs_have_the_workloads_prompts_and_lengths():
    (first, second) = make_input("m", ASKED[:2])["data"]
    assert (first["session_id"], second["session_id"]) == ("0", "1")
    (body,) = second["payloads"]
    assert body["prompt"] == list(ASKED[1].prompt) and body["max_tokens"] == 11 and body["ignore_eos"] is True
    tokenizer = Tokenizer.from_dir(DEMO)
    prompts = make_prompts(tokenizer, 40, 7)
    assert len(prompts) == len(set(prompts.values())) == 40
    for request, text in prompts.items():
        assert request == BenchRequest(tuple(tokenizer.encode(text)), 7) and text.isascii()
    assert make_prompts(tokenizer, 20, 7) == dict(list(prompts.items())[:20])


def test_an_environment_is_made_once_per_set_of_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pins = tmp_path / "pins"
    pins.mkdir()
    (pins / "tool.txt").write_text("package==1\n")
    commands: list[list[str]] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        (tmp_path / ".venv-tool").mkdir(exist_ok=True)

    monkeypatch.setattr(environment, "_PINS", pins)
    monkeypatch.setattr(environment, "_run", run)
    assert find_program("tool", tmp_path) is None
    program = require_program("tool", tmp_path)
    assert program == tmp_path / ".venv-tool/bin/tool"
    make, install = commands
    assert make[1:] == ["-m", "venv", "--clear", str(tmp_path / ".venv-tool")]
    assert install[0].startswith(str(tmp_path)) and install[-1] == str(pins / "tool.txt")
    assert require_program("tool", tmp_path) == find_program("tool", tmp_path) == program
    assert len(commands) == 2, "it is there"
    (pins / "tool.txt").write_text("package==2\n")
    assert find_program("tool", tmp_path) is None


def test_a_failure_of_pip_leaves_no_complete_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str]) -> None:
        if "pip" in command:
            raise ServeError("pip ended with 1")

    monkeypatch.setattr(environment, "_run", run)
    with pytest.raises(ServeError, match="pip"):
        require_program("aiperf", tmp_path)
    assert find_program("aiperf", tmp_path) is None


# ------------------------------------------------------------------------------------------------------- real runs

REQUESTS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    settings = {"max_batch_size": "4", "max_tokens_in_paged_kv_cache": "8192"}
    with serve(
        settings=settings,
        options=ServerOptions(ports=Ports(openai=0), client_apis=ClientApis(model_config=True)),
    ) as running:
        yield running


def needs(name: str) -> pytest.MarkDecorator:
    reason = (
        f"{name} is not installed here, which takes minutes; scripts/bench {name} --model DIR installs it"
    )
    return pytest.mark.skipif(find_program(name) is None, reason=reason)


@pytest.mark.e2e
@needs("aiperf")
def test_aiperf_measures_v1(server: TritonServer):
    program = require_program("aiperf")
    requests = [BenchRequest(tuple(range(20 + index, 60)), 6 + index) for index in range(REQUESTS)]
    timelines = AiperfOnV1(program, DEMO).run(server, requests, 2)
    counts = sorted(timeline.num_output_tokens for timeline in timelines)
    assert counts == [request.num_output_tokens for request in requests]


@pytest.mark.e2e
@needs("genai-perf")
@pytest.mark.parametrize("name", ["v1", "triton"])
def test_genai_perf_measures_v1_and_triton(name: str, server: TritonServer):
    program = require_program("genai-perf")
    prompts = make_prompts(Tokenizer.from_dir(DEMO), REQUESTS, 8)
    timelines = GenaiPerf(name, program, DEMO, prompts).run(server, list(prompts), 2)
    assert len(timelines) >= REQUESTS
    baseline = TritonGrpc().run(server, list(prompts), 2)
    assert {t.num_prompt_tokens for t in timelines} == {t.num_prompt_tokens for t in baseline}


def test_both_programs_parse_their_options():
    given = parser("aiperf", "What it is for.").parse_args(
        ["--model", "a/b", "--requests", "7", "--rounds", "5"]
    )
    assert given.streams == [1, 16, 64]
    wanted = options(given)
    assert (wanted.concurrency, wanted.num_requests, wanted.model) == (64, 7, Path("a/b"))
    assert wanted.num_rounds == 5


def test_children_of_a_tool_end_with_it(tmp_path: Path):
    command = ["/bin/sh", "-c", "sleep 60 & echo $! > child; echo loading; wait"]
    with pytest.raises(ServeError, match=r"sh was not done after 1 s and was ended:\nloading"):
        run_tool(command, dict(os.environ), tmp_path, timeout_s=1)
    stat = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    deadline = time.monotonic() + 60
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the tool's child still runs"
        time.sleep(0.02)


def test_the_output_of_a_failing_tool_is_reported(tmp_path: Path):
    with pytest.raises(ServeError, match=r"sh ended with 3:\nno such model"):
        run_tool(["/bin/sh", "-c", "echo no such model; exit 3"], dict(os.environ), tmp_path)
