"""The requests of Triton's own OpenAI front end to a text model, and its reading of the responses.

The front end starts Triton inside its own process, and so cannot run beside this server. `frontend_tensors`
and `read` replicate it (python/openai/openai_frontend/engine/utils/triton.py of tritonserver's source), with
the settings of docs/openai-server.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import numpy as np
import peft
import pytest
import torch
import transformers
import tritonclient.grpc as grpc
from safetensors.torch import load_file, save_file

from inflight.adapters.convert_lora import main as convert_lora
from inflight.server import cli

from .clients import Answer, ask, wait_for_several
from .conftest import DEMO_MODEL
from .test_adapters import make_adapter

BOS = "<|endoftext|>"
TEMPLATED = f"{BOS}class Reader:\n    def __init__(self, "
"""A text as a chat template renders it."""
COMPLETED = "import os\n\ndef walk("
MAX_TOKENS = 12
MODELS = ["ensemble", "tensorrt_llm_bls"]
TOOL = {
    "type": "object",
    "properties": {"path": {"enum": ["/a", "/b"]}, "depth": {"type": "integer"}},
    "required": ["path", "depth"],
    "additionalProperties": False,
}


def strings(*values: str) -> np.ndarray:
    """Return [[s1, s2, …]] as BYTES."""
    return np.array([[value.encode() for value in values]], np.object_)


def frontend_tensors(
    prompt: str,
    stream: bool = False,
    echo: bool | None = None,
    stop: tuple[str, ...] = (),
    guide: dict | None = None,
    adapter: dict[str, np.ndarray] | None = None,
    **sampling: float,
) -> dict[str, np.ndarray]:
    """Return every tensor of one request; a chat request has no `echo`."""
    tensors = {
        "text_input": strings(prompt),
        "stream": np.bool_([[stream]]),
        "max_tokens": np.int32([[sampling.pop("max_tokens", MAX_TOKENS)]]),
        "return_num_input_tokens": np.bool_([[True]]),
        "return_num_output_tokens": np.bool_([[True]]),
    }
    if stop:
        tensors["stop_words"] = strings(*stop)
    if "seed" in sampling:
        tensors["seed"] = np.uint64([[sampling.pop("seed")]])
    for name in ("top_p", "frequency_penalty", "presence_penalty", "temperature"):
        if name in sampling:
            tensors[name] = np.float32([[sampling.pop(name)]])
    assert not sampling, "it sends nothing else"
    if echo is not None:
        tensors["exclude_input_in_output"] = np.bool_([[not echo]])
    if guide is not None:
        tensors["guided_decoding_guide_type"] = strings("json_schema")
        tensors["guided_decoding_guide"] = strings(json.dumps(guide))
    return tensors | (adapter or {})


@dataclass(frozen=True)
class Reading:
    """Values that the front end reads from responses: text, and token counts of prompt and completion."""

    text: str
    chunks: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int


def read(answers: list[Answer], stream: bool = False) -> Reading:
    if not stream:
        assert 1 <= len(answers) <= 2 and answers[-1].final
        answers = answers[:1]
    chunks: list[str] = []
    prompt_tokens, completion_tokens = None, 0
    for answer in answers:
        assert answer.error is None, answer.error
        if "text_output" in answer.outputs:
            assert answer.outputs["text_output"].size == 1, "exactly one string"
            chunks.append(answer.outputs["text_output"].item().decode())
        if {"num_input_tokens", "num_output_tokens"} <= set(answer.outputs):
            counts = [answer.outputs[f"num_{which}_tokens"] for which in ("input", "output")]
            assert all(count.dtype == np.int32 and count.size == 1 for count in counts)
            # Every chunk has the prompt's count; the front end uses the first.
            prompt_tokens = counts[0].item() if prompt_tokens is None else prompt_tokens
            completion_tokens += counts[1].item()
    assert prompt_tokens is not None and answers[-1].final
    return Reading("".join(chunks), tuple(chunks), prompt_tokens, completion_tokens)


def request(server, model: str = "ensemble", **asked) -> Reading:
    tensors = frontend_tensors(**asked)
    return read(ask(server.grpc, model, **tensors), bool(asked.get("stream")))


@pytest.fixture(scope="module")
def theirs() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def greedy(oracle, theirs):
    """Return a function that completes, by transformers, a text with a written BOS."""

    def complete(text: str, model: torch.nn.Module | None = None) -> str:
        ids = torch.tensor([theirs.encode(text, add_special_tokens=False)])
        model = oracle.oracle if model is None else model
        made = model.generate(
            input_ids=ids,
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        return theirs.decode(made[0, ids.shape[1] :])

    return complete


def test_tritons_front_end_recognizes_the_models_format(pair_server):
    """The front end takes any backend but vllm as TensorRT-LLM's, and sets the first declared input of two
    for `echo`."""
    client = grpc.InferenceServerClient(pair_server.grpc)
    for model in MODELS:
        config = client.get_model_config(model, as_json=True)["config"]
        assert config["backend"] == "python"
        names = ("exclude_input_in_output", "sampling_param_exclude_input_from_output")
        found = [tensor["name"] for tensor in config["input"] if tensor["name"] in names]
        assert found[0] == "exclude_input_in_output"
    client.close()


@pytest.mark.parametrize(
    ("model", "stream"),
    # Streamed texts of tensorrt_llm_bls accumulate on this server.
    [("ensemble", False), ("ensemble", True), ("tensorrt_llm_bls", False)],
)
def test_chats_get_a_completion_without_the_prompt_and_with_one_bos(
    pair_server, theirs, greedy, model, stream
):
    answer = request(pair_server, model, prompt=TEMPLATED, stream=stream)
    assert answer.text == greedy(TEMPLATED)
    assert answer.prompt_tokens == len(theirs.encode(TEMPLATED, add_special_tokens=False))
    assert answer.completion_tokens == MAX_TOKENS
    if stream:
        wait_for_several(lambda: request(pair_server, model, prompt=TEMPLATED, stream=True).chunks)
    else:
        assert len(answer.chunks) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_completions_get_bos_and_echo_is_applied(pair_server, theirs, greedy, stream, echo):
    answer = request(pair_server, prompt=COMPLETED, echo=echo, stream=stream)
    shown = COMPLETED if echo and not stream else ""
    assert answer.text == shown + greedy(BOS + COMPLETED)
    assert answer.prompt_tokens == 1 + len(theirs.encode(COMPLETED, add_special_tokens=False))
    assert answer.completion_tokens == MAX_TOKENS


@pytest.mark.parametrize("stream", [False, True])
def test_stop_words_end_the_text(pair_server, greedy, stream):
    whole = greedy(TEMPLATED)
    stop = whole[4:8]
    answer = request(pair_server, prompt=TEMPLATED, stop=("never said", stop), stream=stream)
    assert answer.text == whole[: whole.index(stop)]
    assert 0 < answer.completion_tokens < MAX_TOKENS


def test_sampling_options_and_seeds_have_their_effect(pair_server, greedy):
    asked = {"prompt": TEMPLATED, "top_p": 0.95, "temperature": 1.5, "seed": 2**63 + 5}
    first = request(pair_server, **asked)
    assert request(pair_server, **asked) == first
    assert request(pair_server, **{**asked, "seed": 0}).text != first.text
    neutral = {"temperature": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "top_p": 1.0}
    assert request(pair_server, prompt=TEMPLATED, **neutral).text == greedy(TEMPLATED)
    penalized = request(pair_server, prompt=TEMPLATED, frequency_penalty=2.0, presence_penalty=2.0)
    assert penalized.text != greedy(TEMPLATED)


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_a_forced_tool_matches_its_schema(pair_server, stream):
    answer = request(pair_server, prompt=TEMPLATED, guide=TOOL, stream=stream, max_tokens=80)
    jsonschema.validate(json.loads(answer.text), TOOL)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a PEFT folder whose numbers FP16 can represent, and the folder for multi_lora.json."""
    root = tmp_path_factory.mktemp("multi lora")
    make_adapter(root / "peft", seed=7)
    weights = root / "peft" / "adapter_model.safetensors"
    save_file({name: value.half().float() for name, value in load_file(weights).items()}, weights)
    assert convert_lora([str(root / "peft"), str(root / "sql"), "--storage-type", "float16"]) == 0
    return root / "peft", root / "sql"


def test_an_adapters_weights_are_sent_once_and_then_only_its_id(pair_server, greedy, adapters):
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    adapted = greedy(TEMPLATED, peft.PeftModel.from_pretrained(base, adapters[0]).eval())
    assert adapted != greedy(TEMPLATED)
    task = {"lora_task_id": np.uint64([[1]])}
    # As they are saved: without a batch dimension.
    files = {name: np.load(adapters[1] / f"model.{name}.npy") for name in ("lora_weights", "lora_config")}
    for adapter in ({**task, **files}, task):
        assert request(pair_server, prompt=TEMPLATED, adapter=adapter).text == adapted

    def streamed() -> tuple[str, ...]:
        answer = request(pair_server, prompt=TEMPLATED, adapter=task, stream=True)
        assert answer.text == adapted
        return answer.chunks

    wait_for_several(streamed)
    assert request(pair_server, prompt=TEMPLATED).text == greedy(TEMPLATED)


def test_the_documented_command_writes_the_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The repository can be written on a machine without a server, and has the files that the front end
    needs."""
    out = tmp_path / "models"
    settings = ["--set", "exclude_input_in_output=true", "--set", "add_special_tokens=auto"]
    assert cli.main([*settings, "--write-repository", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"WRITTEN {out} with ")
    text = (out / "ensemble" / "config.pbtxt").read_text()
    for key, value in (("exclude_input_in_output", "true"), ("add_special_tokens", "auto")):
        assert f'key: "{key}" value {{ string_value: "{value}" }}' in text
    assert (out / "ensemble" / "1").is_dir() and not (out / "ensemble" / "1").is_symlink()
    assert cli.main(["--write-repository", str(out)]) != 0, "it is not overwritten"
