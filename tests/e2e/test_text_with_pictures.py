"""Pictures beside text_input on a real server, compared with transformers' whole model."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc
from PIL import Image

from inflight.openai.options import OpenAiOptions
from inflight.pictures.encoder import PictureEncoder
from inflight.pictures.processor import load_processor
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.ports import Ports
from inflight.server.runtime_directory import find_processes
from inflight.text.tokenizer import Tokenizer
from tests.pictures.small_models import expected_tokens, picture, save_model
from tests.prometheus import parse

from .clients import Answer, ask, generate
from .conftest import REPOSITORY
from .upstream_clients.multimodal_client import run

CASE = "qwen3-vl"
ALONE = "<|vision_start|><|image_pad|><|vision_end|>"
NUM_TOKENS = 8
PATIENCE_S = 120.0
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pictures.md"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for message in messages %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content or [] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
)
MODELS = ("ensemble", "tensorrt_llm", "tensorrt_llm_infer", "tensorrt_llm_bls")
PREPARED = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "prompt_embedding_table": "OUT_PROMPT_EMBEDDING_TABLE",
    "prompt_vocab_size": "OUT_PROMPT_VOCAB_SIZE",
    "prompt_table_extra_ids": "OUT_PROMPT_TABLE_EXTRA_IDS",
    "mrope_rotary_cos_sin": "MROPE_ROTARY_COS_SIN",
    "mrope_position_deltas": "MROPE_POSITION_DELTAS",
}
"""The inputs of `tensorrt_llm` that take outputs of `preprocessing`, and the names of these."""
WIDE, TALL = picture(30, 18), picture(13, 27, seed=1)


@dataclass(frozen=True)
class VisionServer:
    server: TritonServer
    whole: Any
    processor: Any
    tokenizer: Tokenizer
    folder: Path

    def expected(self, text: str, *files: bytes) -> list[int]:
        """Return the greedy tokens of transformers' whole model, by its own processor."""
        return expected_tokens(self.whole, self.processor, text, files, NUM_TOKENS)

    def ask(self, text: str, model: str = "ensemble", **tensors: Any) -> Answer:
        length = (
            "request_output_len" if model.startswith("tensorrt_llm") and "bls" not in model else "max_tokens"
        )
        given = {
            length: NUM_TOKENS,
            "end_id": -1,
            "exclude_input_in_output": True,
            "return_perf_metrics": True,
        }
        (answer,) = ask(self.server.grpc, model=model, text_input=text, **given, **tensors)
        return answer


def image_of(file: bytes) -> Image.Image:
    return Image.open(BytesIO(file)).convert("RGB")


def urls(*files: bytes) -> list[str]:
    return [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory, elsewhere: Path) -> Iterator[VisionServer]:
    folder = tmp_path_factory.mktemp("vision")
    whole = save_model(folder / "checkpoint", CASE)
    processor = load_processor(str(folder / "checkpoint"), whole.config)
    for model in (*MODELS, "multimodal_encoders", "preprocessing"):
        shutil.copytree(
            REPOSITORY / model,
            folder / "repository" / model,
            ignore=shutil.ignore_patterns("demo_model", "__pycache__"),
        )
    settings = {
        "max_tokens_in_paged_kv_cache": "2048",
        "enable_kv_cache_reuse": "true",
        "tokens_per_block": "8",
        "prompt_embedding_table_data_type": "TYPE_FP32",
    }
    (folder / "checkpoint" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "media").mkdir()
    (folder / "media" / "wide.png").write_bytes(WIDE)
    allowed = OpenAiOptions(
        allowed_media_domains=("localhost",), allowed_local_media_path=folder / "media", max_pictures=3
    )
    options = ServerOptions(ports=Ports(openai=0), openai=allowed)
    with serve(folder / "repository", folder / "checkpoint", "float32", settings, options=options) as server:
        tokenizer = Tokenizer.from_dir(str(folder / "checkpoint"))
        yield VisionServer(server, whole, processor, tokenizer, folder / "checkpoint")


def pictures_process(vision: VisionServer) -> int:
    """Return the number of the process that encodes pictures."""
    (pid,) = [
        process.pid
        for process in find_processes(vision.server.repository.path.parent)
        if b"inflight.pictures" in Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    ]
    return pid


@pytest.mark.covers("image_url", "image_url_input", "image_bytes_input", "image_sizes_input")
def test_text_and_pictures_give_transformers_tokens(vision: VisionServer) -> None:
    text = f"What is {ALONE}, and what {ALONE}?"
    expected = vision.expected(text, WIDE, TALL)
    for model in MODELS:
        for name in ("image_url", "image_url_input"):
            answer = vision.ask(text, model, **{name: urls(WIDE, TALL)})
            assert answer.error is None, answer.error
            assert answer.text == vision.tokenizer.decode(expected)
            assert answer.ids in ([], expected)  # models with ensemble's outputs return no ids
    body = {"max_tokens": NUM_TOKENS, "end_id": -1, "exclude_input_in_output": True}
    by_http = generate(vision.server.http, text_input=text, image_url_input=urls(WIDE, TALL), **body)
    assert by_http["text_output"] == vision.tokenizer.decode(expected)
    first = vision.tokenizer.decode(vision.expected(f"{ALONE}Which animal?", WIDE))
    assert vision.ask("Which animal?", image_url_input=urls(WIDE)[0]).text == first
    pixels = np.asarray(image_of(WIDE))
    padded = np.pad(pixels, ((0, 5), (0, 3), (0, 0)))
    given = {"image_sizes_input": np.array([[pixels.shape[:2]]], np.int64)}
    for model in MODELS:
        for array, more in ((pixels, {}), (pixels.transpose(2, 0, 1), {}), (padded, given)):
            answer = vision.ask("Which animal?", model, image_bytes_input=array[None, None], **more)
            assert answer.error is None and answer.text == first


@pytest.mark.parametrize("use_bls", [False, True])
def test_upstreams_multimodal_client_gets_transformers_tokens(vision: VisionServer, use_bls: bool) -> None:
    def ask_as(model_type: str, text: str, *files: bytes, **more: Any) -> str:
        images = [image_of(file) for file in files]
        return run(vision.server, model_type, text, images, NUM_TOKENS, use_bls=use_bls, **more)

    def expected(text: str, *files: bytes) -> str:
        return vision.tokenizer.decode(vision.expected(text, *files))

    for model_type in ("mllama", "llava_onevision"):
        assert ask_as(model_type, "What is this?", WIDE) == expected(f"{ALONE}What is this?", WIDE)
    resized = BytesIO()
    image_of(WIDE).resize((504, 504)).save(resized, "PNG")
    assert ask_as("qwen2_vl", "And this?", WIDE) == expected(f"{ALONE}And this?", resized.getvalue())
    text = f"Compare {ALONE} with {ALONE}."
    for extra_id in (None, 7):
        made = ask_as("pixtral", text, WIDE, TALL, prompt_table_extra_id=extra_id)
        assert made == expected(text, WIDE, TALL)


def test_the_same_picture_reuses_blocks_and_another_does_not(vision: VisionServer) -> None:
    text = f"In {ALONE}: is this a picture of a house?"
    reused = [
        vision.ask(text, image_url=urls(file)).outputs["kv_cache_reused_blocks"].item()
        for file in (picture(30, 18, seed=2), picture(30, 18, seed=3), picture(30, 18, seed=2))
    ]
    # Another picture's request reuses only the tokens before the picture, a part of the first block.
    assert reused[:2] == [0, 1] and reused[2] > 2


@pytest.mark.parametrize(("name", "content"), [("IMAGE_URL", urls(WIDE)[0].encode()), ("IMAGES", WIDE)])
def test_the_encoders_model_returns_rows_for_prompts_of_ids(
    vision: VisionServer, name: str, content: bytes
) -> None:
    tensor = grpc.InferInput(name, (1, 1), "BYTES")
    tensor.set_data_from_numpy(np.array([[content]], np.object_))
    with grpc.InferenceServerClient(vision.server.grpc) as client:
        answer = client.infer("multimodal_encoders", [tensor])
    table, size = (answer.as_numpy(f"OUT_PROMPT_{name}") for name in ("EMBEDDING_TABLE", "VOCAB_SIZE"))
    encoder = PictureEncoder(str(vision.folder), "float32")
    rows = encoder.encode(ALONE, [WIDE], 0).table.rows
    np.testing.assert_array_equal(table[0], np.frombuffer(rows.buffer.data, np.float32).reshape(rows.shape))
    assert size.item() == rows.shape[0]


def inputs_of_preprocessing(text: str, *files: bytes) -> list[grpc.InferInput]:
    """Return the inputs QUERY and, with files, IMAGE_URL."""
    contents = {"QUERY": [text], "IMAGE_URL": urls(*files)}
    tensors = []
    for name, words in contents.items():
        if words:
            array = np.array([[word.encode() for word in words]], np.object_)
            tensors.append(grpc.InferInput(name, array.shape, "BYTES"))
            tensors[-1].set_data_from_numpy(array)
    return tensors


def test_what_preprocessing_returns_is_a_prompt_of_the_engine(vision: VisionServer) -> None:
    text = f"Compare {ALONE} with {ALONE}."
    with grpc.InferenceServerClient(vision.server.grpc) as client:
        prepared = client.infer("preprocessing", inputs_of_preprocessing(text, WIDE, TALL))
    passed_on = {name: prepared.as_numpy(output) for name, output in PREPARED.items()}
    (answer,) = ask(
        vision.server.grpc,
        request_output_len=NUM_TOKENS,
        end_id=-1,
        exclude_input_in_output=True,
        **passed_on,
    )
    assert answer.error is None, answer.error
    assert answer.ids == vision.expected(text, WIDE, TALL)


def test_preprocessing_answers_texts_while_a_picture_is_encoded(vision: VisionServer) -> None:
    files = picture(20, 20, seed=5), picture(20, 20, seed=6)
    answers: Queue[Any] = Queue()
    pid = pictures_process(vision)
    with grpc.InferenceServerClient(vision.server.grpc) as client:
        os.kill(pid, signal.SIGSTOP)
        try:
            for file in files:
                inputs = inputs_of_preprocessing("Which?", file)
                client.async_infer(
                    "preprocessing", inputs, lambda result, error: answers.put((result, error))
                )
            for _ in range(3):
                text = client.infer("preprocessing", inputs_of_preprocessing("Which?"), client_timeout=60)
                assert text.as_numpy("REQUEST_INPUT_LEN").item() == len(vision.tokenizer.encode("Which?"))
            assert answers.empty()
        finally:
            os.kill(pid, signal.SIGCONT)
        for _ in files:
            result, error = answers.get(timeout=60)
            assert error is None and result.as_numpy("OUT_PROMPT_VOCAB_SIZE").item() > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
def test_pictures_are_encoded_again_after_their_process_is_lost(vision: VisionServer, number: int) -> None:
    """A client that sends a failed request again is answered; requests without pictures notice nothing."""
    text, file = f"What is {ALONE}?", picture(24, 16, seed=number)
    expected = vision.tokenizer.decode(vision.expected(text, file))
    os.kill(pictures_process(vision), number)
    begun_s = time.monotonic()
    assert vision.ask("What is it?").error is None
    errors: list[str] = []
    while (answer := vision.ask(text, image_url=urls(file))).error is not None:
        errors.append(str(answer.error))
        assert time.monotonic() < begun_s + PATIENCE_S, errors[-1]
        time.sleep(0.2)
    assert answer.text == expected
    assert all("image_url cannot be encoded now; a later attempt may succeed" in each for each in errors), (
        errors
    )
    print(f"{len(errors)} errors {set(errors)}, {time.monotonic() - begun_s:.1f} s")


def test_the_metrics_pages_count_pictures(vision: VisionServer) -> None:
    def counts(address: str) -> dict[str, float]:
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
            return parse(answer.read().decode()).series("inflight_pictures_total", "rows")

    triton = f"http://{vision.server.metrics}"
    before = counts(triton)
    for _ in range(2):
        assert vision.ask("Which colour?", image_url=urls(picture(25, 25, seed=8))).error is None
    after = counts(triton)
    assert (after["encoded"] - before["encoded"], after["cached"] - before["cached"]) == (1, 1)
    assert counts(vision.server.openai) == after


COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def test_answers_about_pictures_may_be_json_and_tool_calls(vision: VisionServer) -> None:
    def ask_openai(**body: Any) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls(WIDE, TALL)]
        content = [parts[0], {"type": "text", "text": " or "}, parts[1]]
        body |= {"model": "checkpoint", "messages": [{"role": "user", "content": content}]}
        body |= {"max_tokens": 100, "temperature": 0}
        answer = httpx.post(f"{vision.server.openai}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    schema = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    choice = ask_openai(response_format=schema)
    assert json.loads(choice["message"]["content"])["colour"] in ("red", "green")
    tools = [{"type": "function", "function": {"name": "paint", "parameters": COLOUR}}]
    choice = ask_openai(tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "paint" and choice["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"])["colour"] in ("red", "green")


def test_invalid_pictures_are_refused(vision: VisionServer) -> None:
    answer = vision.ask(f"{ALONE} and", image_url=urls(WIDE, TALL))
    assert "the prompt has 1 places for pictures (<|image_pad|>), but 2 image_url" in str(answer.error)
    answer = vision.ask("What?", image_url=urls(b"nonsense"))
    assert "image_url[0] is not a picture of a known format" in str(answer.error)


def test_the_flags_for_urls_hold_for_tritons_tensors(vision: VisionServer) -> None:
    file = f"file://{vision.folder.parent}/media/wide.png"
    expected = vision.tokenizer.decode(vision.expected(f"{ALONE}Which animal?", WIDE))
    for model in MODELS:
        assert vision.ask("Which animal?", model, image_url_input=file).text == expected
    for url, message in (
        ("http://localhost:1/a.png", "image_url[0] is on the host 'localhost', whose address is not public"),
        ("http://example.com/a.png", "which this server may not read from (--allowed-media-domains)"),
        (
            "file:///etc/passwd",
            "image_url[0] is 'file:///etc/passwd', which is not a file in the allowed folder",
        ),
    ):
        assert message in str(vision.ask("What?", image_url=[url]).error)
    answer = vision.ask("What?", image_url=urls(WIDE) * 4)
    assert "image_url: 4 pictures; this server takes at most 3 in a prompt" in str(answer.error)


def test_the_requests_of_the_page_are_answered(vision: VisionServer) -> None:
    blocks = re.findall(r"^```bash\n(curl.*?)^```", PAGE.read_text(), re.S | re.M)
    addresses = {"localhost:9000": vision.server.openai, "localhost:8000": f"http://{vision.server.http}"}
    said = []
    for block in blocks:
        for typed, real in addresses.items():
            block = block.replace(typed, real)
        said.append(subprocess.run(["bash", "-c", block], capture_output=True, cwd=ROOT, check=True).stdout)
    by_openai, by_triton = map(json.loads, said)
    usage = by_openai["usage"]  # tokens are drawn at random, and may end the answer
    assert usage["prompt_tokens"] > 20 and 1 <= usage["completion_tokens"] <= 20
    assert by_triton["text_output"].startswith("What is this?")
