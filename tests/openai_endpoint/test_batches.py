"""/v1/files and /v1/batches with the official client, also across kills of the server."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from openai.types import Batch, Completion

from inflight.build import build_engine
from inflight.core.ports import EngineClient
from inflight.core.request.sleep import SleepAction
from inflight.errors import ConfigError
from inflight.openai.batches.folder import ENTRY_BYTES, BatchFolder, FileRecord
from inflight.openai.batches.jobs import BatchJobs
from inflight.openai.batches.lines import BatchAnswer, BatchRequest, answer_line
from inflight.openai.batches.record import BatchRecord
from inflight.testing.fake_server import load_fake
from tests.openai_endpoint.scripted import ScriptedEngine
from tests.openai_endpoint.serving import DEMO, DEMO_VOCABULARY, PATIENCE_S, fake_engine, served
from tests.triton.factories import make_parameters

FINAL = ("completed", "failed", "cancelled")
COMPLETIONS = "/v1/completions"


def completion(number: int, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    body = {"prompt": f"prompt {number}", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**body, **more}


def lines(bodies: list[dict[str, Any]], url: str = COMPLETIONS) -> bytes:
    each = (
        {"custom_id": f"r{n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in each)


def connect(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def start(client: openai.OpenAI, content: bytes, endpoint: Any = COMPLETIONS, **more: Any) -> Batch:
    uploaded = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h", **more
    )


def wait(client: openai.OpenAI, batch: Batch, until: Callable[[Batch], bool] | None = None) -> Batch:
    """Return the batch when it has ended, or when `until` is true of it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = client.batches.retrieve(batch.id)
        if until(found) if until is not None else found.status in FINAL:
            return found
        assert time.monotonic() < deadline and found.status not in FINAL, found
        time.sleep(0.01)


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of a file of answers by custom_id, which must occur once."""
    assert file_id is not None
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    with fake_engine() as made:
        yield made


@pytest.fixture
def client(engine: EngineClient, tmp_path: Path) -> Iterator[openai.OpenAI]:
    with served(engine, batch_dir=tmp_path / "batches") as url, connect(url) as made:
        yield made


def test_files_are_kept_listed_and_deleted(client: openai.OpenAI, tmp_path: Path) -> None:
    content = lines([completion(0)]) * 3
    names = [f"{letter} ü.jsonl" for letter in "abc"]
    made = [client.files.create(file=(name, content), purpose="batch") for name in names]
    first = client.files.retrieve(made[0].id)
    assert first == made[0]
    assert (first.filename, first.bytes, first.purpose, first.status) == (
        names[0],
        len(content),
        "batch",
        "processed",
    )
    assert client.files.content(first.id).content == content
    assert {each.id for each in client.files.list()} == {each.id for each in made}
    assert [each.id for each in client.files.list(order="asc", limit=2)] == [each.id for each in made]
    assert not client.files.list(purpose="batch_output").data
    assert client.files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.retrieve(first.id)
    folder = tmp_path / "batches"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700 and not list(folder.glob(f"*{first.id}*"))


def test_a_batch_has_the_answers_of_the_same_requests_sent_alone(client: openai.OpenAI) -> None:
    bodies = [completion(number) for number in range(30)]
    bodies[7]["temperature"] = -1
    made = start(client, lines(bodies), metadata={"of": "test"})
    assert (made.status, made.endpoint, made.metadata) == ("validating", COMPLETIONS, {"of": "test"})
    batch = wait(client, made)
    assert batch.status == "completed" and batch.request_counts is not None and batch.errors is None
    assert batch.request_counts.to_dict() == {"total": 30, "completed": 29, "failed": 1}
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    good, bad = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
    assert len(good) == 29 and list(bad) == ["r7"]
    assert bad["r7"]["response"]["status_code"] == 400
    assert bad["r7"]["response"]["body"]["error"]["param"] == "temperature"
    for number in (0, 29):
        got = Completion.model_validate(good[f"r{number}"]["response"]["body"])
        alone = client.completions.create(
            model="demo",
            prompt=f"prompt {number}",
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert got.choices == alone.choices and got.id.endswith(good[f"r{number}"]["response"]["request_id"])
    output = client.files.retrieve(cast(str, batch.output_file_id))
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_a_file_with_a_bad_line_fails_before_anything_is_sent(client: openai.OpenAI) -> None:
    batch = wait(client, start(client, lines([completion(0)]) * 2))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    (error,) = batch.errors.data
    assert (error.line, error.param, error.code) == (2, "custom_id", "duplicate_custom_id")
    assert batch.output_file_id is None and batch.error_file_id is None and batch.failed_at is not None


def test_a_line_for_another_route_than_the_endpoint_fails(client: openai.OpenAI) -> None:
    batch = wait(client, start(client, lines([completion(0)]), "/v1/chat/completions"))
    assert batch.errors is not None and batch.errors.data is not None
    assert batch.errors.data[0].message == ('line 1: url is "/v1/completions", expected /v1/chat/completions')


def test_metadata_is_returned_up_to_its_bounds(client: openai.OpenAI) -> None:
    metadata = {f"{number:064}": "v" * 512 for number in range(16)}
    batch = start(client, lines([completion(1)]), metadata=metadata)
    assert batch.metadata == metadata and wait(client, batch).metadata == metadata


def test_batches_are_listed_in_pages(client: openai.OpenAI) -> None:
    made = [start(client, lines([completion(number)])) for number in range(5)]
    assert [each.id for each in client.batches.list(limit=2)] == [each.id for each in reversed(made)]


def test_requests_of_a_batch_have_the_lowest_priority(tmp_path: Path) -> None:
    engine = ScriptedEngine("yes")
    with served(cast(EngineClient, engine), batch_dir=tmp_path) as url, connect(url) as client:
        wait(client, start(client, lines([completion(0)])))
        client.completions.create(model="demo", prompt="y", extra_body={"priority": 1_000_000})
    batch, live = engine.requests
    assert 0 <= batch.priority < live.priority


def test_a_cancelled_batch_keeps_its_answers_and_sends_no_more(tmp_path: Path) -> None:
    with (
        fake_engine(step_us=2000, max_batch_size="4") as engine,
        served(engine, batch_dir=tmp_path, batch_concurrency=4) as url,
        connect(url) as client,
    ):
        made = start(client, lines([completion(number, 30) for number in range(200)]))
        with pytest.raises(openai.ConflictError, match="which has not ended"):
            client.files.delete(made.input_file_id)
        wait(client, made, lambda batch: bool(batch.request_counts and batch.request_counts.completed > 4))
        assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
        batch = wait(client, made)
        assert batch.status == "cancelled" and batch.request_counts is not None
        assert 4 < batch.request_counts.completed < 200 and batch.request_counts.total == 200
        assert len(answers(client, batch.output_file_id)) == batch.request_counts.completed
        with pytest.raises(openai.ConflictError, match="its status is cancelled"):
            client.batches.cancel(made.id)
        for file_id in (batch.input_file_id, cast(str, batch.output_file_id)):
            client.files.delete(file_id)
        with pytest.raises(openai.NotFoundError):  # it has no file left
            client.batches.retrieve(made.id)
        assert {path.name for path in tmp_path.iterdir()} == {".lock"}


def test_files_and_batches_belong_to_the_key_that_made_them(engine: EngineClient, tmp_path: Path) -> None:
    with (
        served(engine, batch_dir=tmp_path, api_keys=("mine", "yours")) as url,
        connect(url, "mine") as mine,
        connect(url, "yours") as yours,
    ):
        batch = wait(mine, start(mine, lines([completion(0)])))
        assert batch.status == "completed" and batch.output_file_id is not None
        assert len(mine.files.list().data) == 2 and not yours.files.list().data
        assert len(mine.batches.list().data) == 1 and not yours.batches.list().data
        asked: list[Callable[[], object]] = [
            lambda: yours.files.retrieve(batch.input_file_id),
            lambda: yours.files.content(cast(str, batch.output_file_id)),
            lambda: yours.files.delete(batch.input_file_id),
            lambda: yours.batches.retrieve(batch.id),
            lambda: yours.batches.cancel(batch.id),
        ]
        for ask in asked:
            with pytest.raises(openai.NotFoundError):
                ask()
        with pytest.raises(openai.BadRequestError, match="input_file_id is"):
            yours.batches.create(
                input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
            )
    with served(engine, batch_dir=tmp_path, api_keys=("yours", "mine")) as url, connect(url, "mine") as mine:
        assert mine.batches.retrieve(batch.id) == batch  # also after a restart


def test_a_key_that_is_taken_away_ends_the_requests_of_its_batches(
    engine: EngineClient, tmp_path: Path
) -> None:
    with (
        fake_engine(step_us=200_000) as slow,
        served(slow, batch_dir=tmp_path, api_keys=("old",)) as url,
        connect(url, "old") as client,
    ):
        made = start(client, lines([completion(0, 200)]))
        wait(client, made, lambda batch: batch.status == "in_progress")
    with served(engine, batch_dir=tmp_path, api_keys=("new",)):
        record = tmp_path / f"{made.id}.json"
        deadline = time.monotonic() + PATIENCE_S
        while (found := json.loads(record.read_text()))["status"] != "completed":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (errors,) = tmp_path.glob(f"{found['error_id']}.jsonl")
    assert json.loads(errors.read_text())["response"]["status_code"] == 401


def test_without_a_folder_the_flag_is_named(engine: EngineClient) -> None:
    with served(engine) as url, connect(url) as client:
        for ask in (client.files.list, client.batches.list, lambda: start(client, b"{}")):
            with pytest.raises(openai.InternalServerError, match="start it with --batch-dir DIR") as found:
                ask()
            assert found.value.status_code == 501


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"endpoint": "/v1/files"}, "endpoint is '/v1/files', expected /v1/chat/completions or"),
        ({"input_file_id": "file-x"}, "input_file_id is 'file-x', expected the id of a file"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "files are kept until"),
        ({"priority": 1}, "unknown field priority"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata.*expected 16 or fewer values"),
        ({"metadata": {"k" * 65: ""}}, "metadata.*at most 64 characters"),
        ({"metadata": {"k": "v" * 513}}, "metadata.*at most 512 characters"),
    ],
)
def test_a_wrong_batch_is_refused_with_its_field(
    client: openai.OpenAI, fields: dict[str, object], said: str
) -> None:
    uploaded = client.files.create(file=("x", b"{}"), purpose="batch")
    body = {"input_file_id": uploaded.id, "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
    with pytest.raises(openai.BadRequestError, match=said):
        client.post("/batches", body=body, cast_to=object)
    assert not client.batches.list().data


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"data": {"purpose": "batch"}}, "file"),
        ({"data": {"purpose": "batch", "file": "text"}}, "file"),
        ({"files": {"file": b"x"}}, "purpose"),
        ({"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}, "purpose"),
        (
            {"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[anchor]": "created_at"}},
            "expires",
        ),
        ({"json": {"purpose": "batch"}}, "purpose"),
        ({"content": b"nonsense", "headers": {"Content-Type": "multipart/form-data"}}, "multipart"),
        (
            {"content": b"nonsense", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
            "multipart",
        ),
    ],
)
def test_a_wrong_upload_is_refused_and_leaves_nothing(
    client: openai.OpenAI, tmp_path: Path, form: dict[str, Any], param: str
) -> None:
    answer = httpx.post(f"{client.base_url}files", **form)
    assert answer.status_code == 400 and param in answer.json()["error"]["message"]
    assert {path.name for path in (tmp_path / "batches").iterdir()} == {".lock"}


def test_a_page_of_another_site_cannot_upload(engine: EngineClient, tmp_path: Path) -> None:
    headers = {"Origin": "https://other.example", "Sec-Fetch-Site": "cross-site"}
    upload: dict[str, Any] = {"files": {"file": b"x"}, "data": {"purpose": "batch"}, "headers": headers}
    with served(engine, batch_dir=tmp_path) as url:
        answer = httpx.post(f"{url}/v1/files", **upload)
        assert answer.status_code == 403 and "--allowed-origins" in answer.json()["error"]["message"]
    with served(engine, batch_dir=tmp_path, cors_origins=("https://other.example",)) as url:
        assert httpx.post(f"{url}/v1/files", **upload).status_code == 200


def test_the_folder_has_a_size(engine: EngineClient, tmp_path: Path) -> None:
    limit = 20_000 + 5 * ENTRY_BYTES
    with served(engine, batch_dir=tmp_path, max_batch_bytes=limit) as url, connect(url) as client:
        with pytest.raises(openai.APIStatusError, match="no room for") as found:
            client.files.create(file=("x", b"x" * limit), purpose="batch")
        assert found.value.status_code == 413
        bodies = [completion(number) for number in range(100)]
        batch = wait(client, start(client, lines(bodies)))
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        assert batch.errors.data[0].code == "storage_full" and batch.request_counts is not None
        kept = answers(client, batch.output_file_id)
        assert 0 < len(kept) == batch.request_counts.completed < 100
        assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) <= limit
        client.files.delete(batch.input_file_id)
        client.files.delete(cast(str, batch.output_file_id))
        room = limit - 2 * ENTRY_BYTES
        client.files.create(file=("x", b"x" * room), purpose="batch")  # all has been given back


def test_two_servers_do_not_use_one_folder(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path, 1 << 20)
    with pytest.raises(ConfigError, match=f"--batch-dir {tmp_path}: another server uses this folder"):
        BatchFolder(tmp_path, 1 << 20)
    folder.close()
    BatchFolder(tmp_path, 1 << 20).close()


def test_what_a_killed_process_left_is_removed_or_continued(tmp_path: Path) -> None:
    """A batch of which one answer is written, the next torn; uploads and records in part."""
    asked: list[str] = []

    async def never(owner: bytes, request: BatchRequest) -> BatchAnswer:
        if request.custom_id != "r0":
            await asyncio.sleep(3600)
        return BatchAnswer(200, "", {"by": "first"})

    async def send(owner: bytes, request: BatchRequest) -> BatchAnswer:
        asked.append(request.custom_id)
        return BatchAnswer(200 if request.custom_id != "r2" else 400, "", {})

    async def first() -> str:
        folder = BatchFolder(tmp_path, 1 << 20)
        jobs = BatchJobs(folder, never, 2)
        jobs.start()
        with folder.open_to_append("file-in") as file:
            file.write(lines([completion(number) for number in range(4)]))
        folder.grow(ENTRY_BYTES)
        batch = jobs.create(folder.publish("file-in", "", "in", "batch"), COMPLETIONS, "24h", None)
        while not batch.completed:
            await asyncio.sleep(0.001)
        with folder.open_to_append(batch.output_id) as output:
            output.write(b'{"id":"batch_req_torn')
        await jobs.close()
        return batch.id

    async def second(batch_id: str) -> None:
        folder = BatchFolder(tmp_path, 1 << 20)
        jobs = BatchJobs(folder, send, 2)
        jobs.start()
        batch = jobs.find("", batch_id)
        assert batch is not None
        while not batch.is_final:
            await asyncio.sleep(0.001)
        assert (batch.status, batch.completed, batch.failed) == ("completed", 3, 1)
        written = [json.loads(line) for line in folder.content(batch.output_id).read_text().splitlines()]
        assert {line["custom_id"]: line["response"]["body"] for line in written}["r0"] == {"by": "first"}
        assert len(written) == 3
        await jobs.close()

    batch_id = asyncio.run(first())
    (tmp_path / "file-upload.jsonl").write_text("part of an upload")
    (tmp_path / "batch_x.part").write_text("part of a record")
    asyncio.run(second(batch_id))
    assert sorted(asked) == ["r1", "r2", "r3"]
    assert not (tmp_path / "file-upload.jsonl").exists() and not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("fault", ["torn", "gone", "no record"])
def test_a_batch_ends_when_its_files_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A disk that is full in the middle of a line, files that somebody removes, and a record without room."""

    async def send(owner: bytes, request: BatchRequest) -> BatchAnswer:
        if fault == "gone":
            for path in tmp_path.glob("file-*"):
                path.unlink()
        return BatchAnswer(200, "", {"text": "x" * 100})

    def torn(custom_id: str, answer: BatchAnswer) -> bytes:
        line = whole(custom_id, answer)
        if custom_id != "r2":
            return line
        output = next(path for path in tmp_path.glob("file-*.jsonl") if b"batch_req_" in path.read_bytes())
        with output.open("ab") as file:
            file.write(line[:50])
        raise OSError(errno.ENOSPC, "No space left on device")

    def full(name: str, record: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        folder = BatchFolder(tmp_path, 1 << 20)
        jobs = BatchJobs(folder, send, 1)
        jobs.start()
        with folder.open_to_append("file-in") as file:
            file.write(lines([completion(number) for number in range(4)]))
        folder.grow(ENTRY_BYTES)
        batch = jobs.create(folder.publish("file-in", "", "in", "batch"), COMPLETIONS, "24h", None)
        if fault == "torn":
            monkeypatch.setattr("inflight.openai.batches.jobs.answer_line", torn)
        elif fault == "no record":
            monkeypatch.setattr(folder, "write_record", full)
        while jobs.num_unfinished:
            await asyncio.sleep(0.001)
        assert batch.status == "failed" and batch.problems[-1].code == "server_error"
        if fault == "torn":
            kept = [json.loads(line) for line in folder.content(batch.output_id).read_text().splitlines()]
            assert [line["custom_id"] for line in kept] == ["r0", "r1"] and batch.has_output
        await jobs.close()

    whole = answer_line
    asyncio.run(run())


def test_a_batch_that_cannot_begin_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(owner: bytes, request: BatchRequest) -> BatchAnswer:
        return BatchAnswer(200, "", {})

    def full(name: str, record: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        folder = BatchFolder(tmp_path, 4 * ENTRY_BYTES + 200)
        jobs = BatchJobs(folder, send, 1)
        source = FileRecord("", "file-in", 0, 0, "in", "batch")
        with monkeypatch.context() as broken:
            broken.setattr(folder, "write_record", full)
            for _ in range(3):
                with pytest.raises(OSError, match="No space"):
                    jobs.create(source, COMPLETIONS, "24h", None)
        assert not list(tmp_path.glob("file-*"))
        folder.grow(4 * ENTRY_BYTES)  # all room is there
        await jobs.close()

    asyncio.run(run())


def test_a_damaged_record_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "batch_1.json").write_bytes(b"")
    folder = BatchFolder(tmp_path, 1 << 20)
    with pytest.raises(ConfigError, match=r"batch_1\.json is damaged .*move it out"):
        folder.read_records("batch_", BatchRecord)
    folder.close()


@contextmanager
def endpoint(socket: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of /v1, connected to an engine's socket."""
    place = ["--engine-endpoint", str(socket), "--port", "0", "--served-model-name", "demo"]
    limits = ["--batch-dir", str(folder), "--batch-concurrency", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "inflight.openai", *place, *limits], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        word, url = process.stdout.readline().split()
        assert word == "LISTENING"
        yield process, url
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended"])
def test_a_batch_goes_on_after_the_server_has_ended(tmp_path: Path, is_killed: bool) -> None:
    parameters = make_parameters(
        gpt_model_path=f"vocab={DEMO_VOCABULARY},step_us=1000", tokenizer_dir=str(DEMO), max_batch_size="4"
    )
    socket, folder = tmp_path / "engine.sock", tmp_path / "batches"
    running = build_engine(parameters, "", str(socket), load=load_fake)
    try:
        with endpoint(socket, folder) as (process, url), connect(url) as client:
            made = start(client, lines([completion(number, 20) for number in range(120)]))
            wait(
                client, made, lambda batch: bool(batch.request_counts and batch.request_counts.completed > 8)
            )
            if is_killed:
                process.kill()
            else:
                process.terminate()
            process.wait(PATIENCE_S)
        record = json.loads((folder / f"{made.id}.json").read_text())
        assert record["status"] == "in_progress"
        before = (folder / f"{record['output_id']}.jsonl").read_bytes()
        kept = before[: before.rfind(b"\n") + 1]
        assert 8 < kept.count(b"\n") < 120
        with endpoint(socket, folder) as (_, url), connect(url) as client:
            batch = wait(client, made)
            assert batch.status == "completed" and batch.request_counts is not None
            assert batch.request_counts.to_dict() == {"total": 120, "completed": 120, "failed": 0}
            content = client.files.content(cast(str, batch.output_file_id)).content
            assert content.startswith(kept) and len(answers(client, batch.output_file_id)) == 120
    finally:
        running.close(0.0)


def test_a_batch_waits_while_the_engine_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [completion(n) for n in range(3)]
    with (
        fake_engine(enable_sleep_mode="true") as engine,
        served(engine, batch_dir=tmp_path) as url,
        connect(url) as client,
    ):
        command, asked = engine.sleep, threading.Semaphore(0)

        def sleep(action: SleepAction, timeout_s: float) -> bool:
            is_asleep = command(action, timeout_s)
            asked.release()
            return is_asleep

        command(SleepAction.SLEEP, PATIENCE_S)
        monkeypatch.setattr(engine, "sleep", sleep)
        batch = start(client, lines(bodies))
        for _ in range(2 * len(bodies)):  # each request has asked, and most have asked again
            assert asked.acquire(timeout=PATIENCE_S)
        command(SleepAction.WAKE_UP, PATIENCE_S)
        counts = wait(client, batch).request_counts
        assert counts is not None and (counts.completed, counts.failed) == (3, 0)
        page = httpx.get(f"{url}/metrics").text
        assert f'{{handler="{COMPLETIONS}",method="POST",status="2xx",code="200"}} 3' in page
        assert 'code="503"' not in page


def test_uploads_may_be_streamed_from_a_file(client: openai.OpenAI) -> None:
    content = lines([completion(number) for number in range(20_000)])
    assert len(content) > 2 << 20
    made = client.files.create(file=("large.jsonl", io.BytesIO(content)), purpose="batch")
    assert made.bytes == len(content) and client.files.content(made.id).content == content
