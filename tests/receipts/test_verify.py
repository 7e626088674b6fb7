"""The command `inflight verify`: its findings and its exit codes, with runs of the demo model."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inflight.core.request.adapter import LoraRequest
from inflight.core.request.sampling_config import SamplingConfig
from inflight.receipts import verify
from inflight.receipts.document import NO_TEXT, EngineForm, OutputForm, Receipt, finished, request_form
from inflight.receipts.verify import differing_environment, first_difference
from tests.openai_endpoint.serving import DEMO
from tests.receipts.factories import engine, make_document, make_receipt, make_request, run_together, sampled

ROOT = Path(__file__).parents[2]
SMALL = "--set=max_tokens_in_paged_kv_cache=8192"
Verify = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def receipt() -> Receipt:
    with engine() as client:
        return run_together(client, [(make_request(sampling=sampled(random_seed=5), new=12), NO_TEXT)])[0]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Verify:
    """Return a function that verifies a document and returns (exit code, lines)."""

    def run(document: Any, *options: str) -> tuple[int, list[str]]:
        file = tmp_path / "receipt.json"
        file.write_text(document if isinstance(document, str) else json.dumps(document))
        code = verify.main([str(file), SMALL, *options])
        return code, capsys.readouterr().out.splitlines()

    return run


def document_of(receipt: Receipt, **changes: Any) -> dict[str, Any]:
    """Return the document of a receipt with other fields, and a right digest."""
    return json.loads(finished(msgspec.structs.replace(receipt, **changes), ""))


def test_equal_tokens(run: Verify, receipt: Receipt) -> None:
    assert run({"receipt": document_of(receipt)}) == (0, ["equal: 12 tokens"])


def test_the_first_difference_is_named(run: Verify, receipt: Receipt) -> None:
    ids = list(receipt.outputs[0].token_ids)
    changed = OutputForm(token_ids=(*ids[:3], ids[3] + 1, *ids[4:]), finish_reason="LENGTH")
    code, lines = run(document_of(receipt, outputs=(changed,)))
    assert (code, lines) == (1, [f"different: token 3 is {ids[3]}, in the receipt {ids[3] + 1}"])


def test_another_instruction_set_and_version_promise_nothing(run: Verify, receipt: Receipt) -> None:
    other = msgspec.structs.replace(receipt.engine, instruction_set="sse")
    code, lines = run(document_of(receipt, engine=other, software={**receipt.software, "torch": "1.0"}))
    assert code == 0
    assert lines == [
        f"equal tokens are not promised: torch was 1.0, here it is {receipt.software['torch']}",
        f"equal tokens are not promised: instruction_set was sse, here it is {receipt.engine.instruction_set}",
        "equal: 12 tokens",
    ]


def test_another_model_is_not_the_receipts(run: Verify, receipt: Receipt, tmp_path: Path) -> None:
    model = tmp_path / "demo_model"
    shutil.copytree(DEMO, model)
    settings = model / "generation_config.json"
    settings.write_text(settings.read_text() + "\n")
    (model / "chat_template.jinja").write_text("")
    code, lines = run(document_of(receipt), "--model", str(model))
    assert code == 1
    assert lines[0] == "chat_template.jinja is here, and the receipt's model does not have it"
    assert lines[1].startswith("generation_config.json has another content: ")
    assert lines[2:] == ["equal: 12 tokens", "this is not the model of the receipt, as shown above"]


def test_an_altered_receipt_is_not_rerun(run: Verify) -> None:
    document = make_document()
    document["outputs"][0]["token_ids"][0] += 1
    assert run(document) == (1, ["the receipt was altered: its digest is not that of its content"])


def test_signatures(run: Verify, receipt: Receipt, tmp_path: Path) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_bytes(b"secret")
    other.write_bytes(b"another")
    signed = json.loads(finished(receipt, str(key)))
    assert run(signed, "--key", str(key)) == (0, ["equal: 12 tokens"])
    assert run(signed, "--key", str(other)) == (1, ["the receipt was not signed with this key"])
    assert run(make_document(), "--key", str(key)) == (1, ["the receipt is not signed"])
    code, (line,) = run(signed, "--key", str(tmp_path / "missing"))
    assert (code, line) == (
        2,
        f"cannot be re-run: the key file of receipts '{tmp_path}/missing' cannot be read: "
        "No such file or directory",
    )


@pytest.mark.parametrize(
    ("fields", "options", "reason"),
    [
        ({"cannot_rerun": "why"}, [], "why"),
        (
            {"model": msgspec.structs.replace(make_receipt().model, name="llama")},
            [],
            "the model is llama: name its folder with --model DIR",
        ),
        ({}, ["--model", "/nowhere"], "/nowhere: not a folder"),
        (
            {"request": request_form(make_request(lora=LoraRequest(name="sql")))},
            [],
            "the request has an adapter: name its folder with --lora FOLDER",
        ),
        (
            {
                "request": request_form(make_request(sampling=SamplingConfig(beam_width=2))),
                "outputs": (OutputForm(token_ids=(1,), finish_reason="CANCELLED"),) * 2,
            },
            [],
            "the beam search was stopped, and its beams may change until its end",
        ),
        ({"request": request_form(make_request(()))}, [], "input_ids"),
        (
            {"engine": msgspec.structs.replace(make_receipt().engine, parameters={"record_path": "records"})},
            [],
            "engine.parameters has record_path, which this version does not write there",
        ),
        ({}, ["--set", "dtype=int3"], "config.pbtxt of the receipt:"),
    ],
)
def test_what_cannot_be_rerun(run: Verify, fields: dict[str, Any], options: list[str], reason: str) -> None:
    code, lines = run(make_document(**fields), *options)
    last = next(line for line in lines if line.startswith("cannot be re-run"))
    assert code == 2 and last.startswith(f"cannot be re-run: {reason}")


def test_what_cannot_be_read(run: Verify) -> None:
    for text in ("", "{", "[]", '{"text": 5}'):
        code, (line,) = run(text)
        assert code == 2 and "receipt.json: cannot be read: " in line
    assert verify.main(["/nowhere"]) == 2
    with pytest.raises(SystemExit) as ended:
        verify.main(["--modl"])
    assert ended.value.code == 2


def test_a_receipt_may_come_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(make_document(cannot_rerun="why"))))
    assert verify.main(["-"]) == 2
    assert capsys.readouterr().out == "cannot be re-run: why\n"


def outputs(*token_ids: int, reason: str = "LENGTH") -> Receipt:
    return make_receipt(outputs=(OutputForm(token_ids=token_ids, finish_reason=reason),))


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        (outputs(1, 2), outputs(1, 2), ""),
        (outputs(1, 2), outputs(1, 2, reason="END_ID"), "the end is END_ID, in the receipt LENGTH"),
        (outputs(1, 2), outputs(1, 2, 3), "3 tokens, in the receipt 2"),
        (outputs(1, 2), outputs(1, 3), "token 1 is 3, in the receipt 2"),
        (outputs(1, 2, reason="CANCELLED"), outputs(1, 2, 3), ""),
        (outputs(1, 2, reason="TIMED_OUT"), outputs(1, 3, 3), "token 1 is 3, in the receipt 2"),
        (outputs(1, 2, reason="TIMED_OUT"), outputs(1), "1 tokens, in the receipt 2"),
        (outputs(1), make_receipt(outputs=()), "0 outputs, in the receipt 1"),
    ],
)
def test_first_difference(before: Receipt, now: Receipt, difference: str) -> None:
    assert first_difference(before, now) == difference


def test_settings_that_differ_are_named() -> None:
    def made(**parameters: str) -> Receipt:
        return make_receipt(
            engine=EngineForm(dtype="float32", kernels="native", device="x86_64", parameters=parameters)
        )

    before = made(tensor_parallel_size="2", pipeline_parallel_size="2", kv_cache_dtype="int8")
    assert list(differing_environment(before, made(kv_cache_dtype="int8"))) == [
        "equal tokens are not promised: tensor_parallel_size was 2, here it is the default"
    ]


def test_help_installs_nothing() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'backend')!r}); "
    program += "from inflight.receipts.verify import main; main(['--help'])"
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "usage: scripts/verify" in done.stdout
