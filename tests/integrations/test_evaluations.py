"""lm-eval and GuideLLM before the demo model; the expected log probabilities and texts are transformers'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.integrations.clients import GUIDELLM, LM_EVAL
from tests.integrations.environments import install, run
from tests.openai_endpoint.serving import DEMO, demo_engine, served

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]  # some install gigabytes

TASKS = Path(__file__).with_name("lm_eval_tasks")
DOCS: list[dict[str, Any]] = [json.loads(line) for line in (TASKS / "docs.jsonl").read_text().splitlines()]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
MAX_TOKENS = 12  # as in writes.yaml


class Reference:
    """The demo model in transformers."""

    def __init__(self) -> None:
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(DEMO))
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(DEMO), dtype=torch.float32)

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return found

    @property
    def end_id(self) -> int:
        found: int = self._tokenizer.eos_token_id
        return found

    @torch.no_grad()
    def log_likelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Return the sum of a continuation's log probabilities, and whether each token is the likeliest."""
        ids = torch.tensor([[*context, *continuation]])
        log_probs = self._model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(continuation)
        total = log_probs.gather(1, wanted[:, None]).sum().item()
        return total, bool((log_probs.argmax(-1) == wanted).all())

    @torch.no_grad()
    def greedy(self, prompt: str) -> str:
        ids = torch.tensor([self.ids(prompt)])
        out = self._model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)
        text: str = self._tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return text.split("\n\n")[0]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with demo_engine() as engine, served(engine) as url:
        yield url


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """Return what lm-eval logged about each document of a task, in order."""
    (file,) = folder.glob(f"**/samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda each: each["doc_id"])


def test_lm_eval_computes_what_transformers_computes(url: str, reference: Reference, tmp_path: Path) -> None:
    """Log likelihoods of choices and of whole texts, and greedy texts, with the server's tokenizer."""
    installed = install(LM_EVAL, tmp_path)
    shutil.copytree(TASKS, tmp_path, dirs_exist_ok=True)
    model = f"model=demo,base_url={url}/v1/completions,num_concurrent=2"
    command = ["--model", "local-completions", "--model_args", model, "--tasks", "choices,writes,likelihood"]
    options = ["--include_path", ".", "--output_path", "out", "--log_samples"]
    run([installed / "lm_eval", *command, *options], tmp_path, **OFFLINE)

    for doc, sample in zip(DOCS, samples(tmp_path, "choices"), strict=True):
        context = reference.ids(doc["question"])
        for choice, (total, is_greedy) in zip(doc["choices"], sample["filtered_resps"], strict=True):
            continuation = reference.ids(doc["question"] + choice)[len(context) :]
            wanted, is_likeliest = reference.log_likelihood(context, continuation)
            assert float(total) == pytest.approx(wanted, abs=1e-3)
            assert is_greedy == str(is_likeliest)
    for doc, sample in zip(DOCS, samples(tmp_path, "likelihood"), strict=True):
        wanted, _ = reference.log_likelihood([reference.end_id], reference.ids(doc["question"]))
        assert float(sample["filtered_resps"][0]) == pytest.approx(wanted, abs=1e-3)
    for doc, sample in zip(DOCS, samples(tmp_path, "writes"), strict=True):
        assert sample["filtered_resps"] == [reference.greedy(doc["question"])]


def test_guidellm_counts_the_tokens_of_each_request(url: str, tmp_path: Path) -> None:
    installed = install(GUIDELLM, tmp_path)
    num_requests, num_tokens = 12, 8
    command = [
        *("--backend", f"kind=openai_http,target={url},model=demo"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={num_requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={num_tokens}"),
        *("--output", "kind=json,path=report.json", "--disable-console-interactive"),
    ]
    run([installed / "guidellm", "run", *command], tmp_path, **OFFLINE)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    found = benchmark["metrics"]["request_totals"]
    assert found == {"successful": num_requests, "errored": 0, "incomplete": 0, "total": num_requests}
    for request in benchmark["requests"]["successful"]:
        assert request["output_tokens"] == num_tokens and request["prompt_tokens"] >= 32
        assert request["time_to_first_token_ms"] <= request["request_latency"] * 1000
