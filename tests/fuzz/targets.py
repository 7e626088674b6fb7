"""Functions to fuzz: each passes bytes from outside to one of this package's parsers.

A target may raise the errors that its parser documents; anything else is a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import json
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgspec
import numpy as np
import torch
from gguf import GGUFWriter
from openai._streaming import SSEDecoder
from safetensors.torch import save

from inflight.adapters.lora_files import CONFIG_FILE, WEIGHTS_FILE, read_lora_files, write_lora_files
from inflight.adapters.peft_folder import read_peft_folder
from inflight.checkpoint_config import ConfigFile
from inflight.core.request.adapter import LoraRequest, LoraWeights, Matrix, RawBuffer
from inflight.core.request.prompt_table import PromptTable
from inflight.core.request.request import FloatTensor, Request
from inflight.core.request.response import Response, ReturnedOutput
from inflight.endpoint import frames
from inflight.errors import InflightError, Name
from inflight.gguf.config import make_config
from inflight.gguf.header import read_header
from inflight.gguf.tokenizer import make_tokenizer
from inflight.models.registry import describe
from inflight.openai.batches.lines import read_requests
from inflight.openai.streaming import event
from inflight.pickled_header import PICKLED, pickled_tensors
from inflight.pictures.sources import SourceRules, read_picture
from inflight.receipts.document import parse, to_request
from inflight.safetensors_header import tensor_ranges
from inflight.server.config_text import fill_fields, read_parameters, set_parameters
from inflight.serving.chat.reasoning import reasoning_stream
from inflight.serving.chat.reasoning_formats import REASONING_FORMATS, REASONING_PARSERS
from inflight.serving.chat.tool_calls import tool_call_stream
from inflight.serving.chat.tool_format_table import TOOL_CALL_PARSERS, TOOL_FORMATS
from inflight.text.tokenizer import Tokenizer
from inflight_client.chat import read_texts
from tests.endpoint.factories import make_result
from tests.receipts.factories import make_document

DATA = Path(__file__).parent
_FOLDER = tempfile.TemporaryDirectory(prefix="inflight-fuzz-")
_SCRATCH = Path(_FOLDER.name)
_UNCONNECTED = socket.socket(socket.AF_UNIX)

PUBLISHED: dict[str, Any] = json.loads((DATA.parent / "models" / "published_configs.json").read_text("utf-8"))
_CONFIGS = sorted(PUBLISHED)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**30, 0.0, 0.5, -1.5, 1e308, float("nan"),
    float("inf"), "", "a", "linear", "yarn", "full_attention", [], [0], [-1, "a"], [[]], {}, {"a": 1},
    {"rope_type": "yarn", "factor": -1}, [None] * 3,
)  # fmt: skip


class Choices:
    """Decisions made by the bytes of an input; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_used_up(self) -> bool:
        """Whether all bytes have been taken."""
        return self._at >= len(self._data)

    def below(self, count: int) -> int:
        """Return a number from 0 to count - 1, by one byte or by two if there are more than 256."""
        size = 1 if count <= 256 else 2
        taken = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(taken, "big") % count


def changed(document: Any, choices: Choices) -> Any:
    """Return a copy of a JSON document with values replaced, removed or added at chosen places."""
    document = copy.deepcopy(document)
    while not choices.is_used_up:
        at: Any = document
        while True:
            keys: list[Any] = sorted(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                return document
            key = keys[choices.below(len(keys))]
            if isinstance(at[key], dict | list) and at[key] and choices.below(2):
                at = at[key]
                continue
            value = copy.deepcopy(_VALUES[choices.below(len(_VALUES))])
            if choices.below(4) == 0:
                del at[key]
            else:
                at[key] = value
            break
    return document


def edited(content: bytes, choices: Choices) -> bytes:
    """Return a copy of a file with chosen bytes replaced, and sometimes cut."""
    result = bytearray(content)
    while result and not choices.is_used_up:
        at, value = choices.below(len(result)), choices.below(256)
        if value == 254:
            del result[at:]
        else:
            result[at] = value
    return bytes(result)


def endpoint_frames(data: bytes) -> None:
    """Messages of the engine and of front ends, whole."""
    for decode in (
        frames.decode_from_engine,
        frames.FrontEndFrames(_UNCONNECTED).decode,
        frames.frame_length,
    ):
        with contextlib.suppress(InflightError):
            decode(data)


def endpoint_stream(data: bytes) -> None:
    """A front end's connection, with the buffers that follow messages."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(5)
        theirs.sendall(data[:60_000])
        theirs.close()
        reader = frames.FrontEndFrames(ours)
        try:
            while reader.read() is not None:
                pass
        except InflightError:
            pass


def endpoint_submit(data: bytes) -> None:
    """A request with an adapter and a table, with changed values; its raw buffers have any length."""
    with contextlib.suppress(InflightError):
        message = _SHORT_SUBMIT if data[:1] and data[0] % 4 else _SUBMIT
        _received(
            changed(message, Choices(data[1:])), data[:1], lambda end: frames.FrontEndFrames(end).read()
        )


def endpoint_response(data: bytes) -> None:
    """A response with logits and additional outputs, with changed values; its tensors have any length."""

    def read(end: socket.socket) -> None:
        answer = frames.decode_from_engine(frames.read_frame(end) or b"")
        if isinstance(answer, frames.EngineResponse):
            frames.read_response(end, answer)

    with contextlib.suppress(InflightError):
        _received(changed(_RESPONSE, Choices(data[1:])), data[:1], read)


def _received(message: Any, length: bytes, read: Callable[[socket.socket], object]) -> None:
    """Read a message, which some bytes follow, from a connection."""
    try:
        body = msgspec.msgpack.encode(message)
    except OverflowError:  # msgpack has no numbers of more than 64 bits
        return
    num_following = _BUFFER_BYTES if length < b"\x80" else 2 * length[0] - 256
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(len(body).to_bytes(frames.LENGTH_BYTES, "big") + body + bytes(num_following))
        theirs.close()
        read(ours)


def config_json(data: bytes) -> None:
    """config.json of a published model with changed values; several families."""
    choices = Choices(data)
    config = PUBLISHED[_CONFIGS[choices.below(len(_CONFIGS))]]
    _described(changed(config, choices))


def config_text(data: bytes) -> None:
    """config.json as any bytes."""
    path = _SCRATCH / "config.json"
    path.write_bytes(data)
    try:
        config = ConfigFile.load(path)
    except InflightError:
        return
    _described(config.values)


def _described(values: dict[str, Any]) -> None:
    with contextlib.suppress(InflightError):
        describe(ConfigFile(_SCRATCH / "config.json", values))


def safetensors_header(data: bytes) -> None:
    """The header of a safetensors file."""
    path = _SCRATCH / "model.safetensors"
    path.write_bytes(data)
    with path.open("rb") as file:
        tensor_ranges(file.fileno())


def pickled_header(data: bytes) -> None:
    """A file of `torch.save`: its pickle changed, or any bytes."""
    path = _SCRATCH / PICKLED
    if data[:1] < b"\xe0":
        with ZipFile(path, "w") as archive:
            archive.writestr("model/data.pkl", edited(_PICKLE, Choices(data)))
    else:
        path.write_bytes(data)
    for header in pickled_tensors(path).values():
        assert isinstance(header.dtype, str) and all(isinstance(size, int) for size in header.shape)


def tokenizer_json(data: bytes) -> None:
    """tokenizer.json of the demo model, or any bytes, beside a tokenizer_config.json with changed values."""
    folder = _SCRATCH / "tokenizer"
    folder.mkdir(exist_ok=True)
    choices = Choices(data)
    content = json.dumps(changed(_TOKENIZER, choices)).encode() if data[:1] < b"\x80" else data[1:]
    (folder / "tokenizer.json").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(changed(_TOKENIZER_CONFIG, Choices(data[::-1]))))
    (folder / "config.json").write_text("{}")
    try:
        tokenizer = Tokenizer.from_dir(folder)
        tokenizer.decode(tokenizer.encode("Some text, é\n"))
    except InflightError:
        pass


def gguf_file(data: bytes) -> None:
    """The header of a GGUF file, as config.json and tokenizer.json."""
    path = _SCRATCH / "model.gguf"
    path.write_bytes(edited(_GGUF, Choices(data)) if data[:1] < b"\xc0" else data)
    try:
        header, keys = read_header([path])
        describe(ConfigFile(_SCRATCH / "config.json", make_config(header, keys)))
        make_tokenizer(header.architecture, keys)
    except InflightError:
        pass


def peft_folder(data: bytes) -> None:
    """A LoRA adapter's configuration with changed values, and its tensors as any bytes."""
    folder = _SCRATCH / "peft"
    folder.mkdir(exist_ok=True)
    choices = Choices(data)
    (folder / "adapter_config.json").write_text(json.dumps(changed(_PEFT_CONFIG, choices)))
    (folder / "adapter_model.safetensors").write_bytes(_PEFT_TENSORS if data[:1] < b"\xc0" else data)
    with contextlib.suppress(InflightError):
        read_peft_folder(folder)


def lora_files(data: bytes) -> None:
    """An adapter in the converter's two files of arrays, one of them changed or any bytes."""
    folder = _SCRATCH / "lora"
    if not folder.exists():
        write_lora_files(LoraWeights(_ROWS, ((0, 0, 1), (1, 0, 1))), folder)
    path = folder / (WEIGHTS_FILE if data[:1] < b"\x80" else CONFIG_FILE)
    content = path.read_bytes()
    path.write_bytes(edited(content, Choices(data[1:])) if data[:1] < b"\xc0" else data[1:])
    try:
        read_lora_files(folder)
    except InflightError:
        pass
    finally:
        path.write_bytes(content)


def config_pbtxt(data: bytes) -> None:
    """A config.pbtxt of a user; what is written is read again."""
    text = fill_fields(data.decode("utf-8", "replace"))
    read_parameters(text)
    values = {"key": 'a"\\\n', "other": ""}
    assert read_parameters(set_parameters("", values)) == values
    set_parameters(text, values)


def receipt(data: bytes) -> None:
    """A receipt with changed values, and any JSON."""
    choices = Choices(data)
    documents: list[Any] = [changed(_RECEIPT, choices)]
    with contextlib.suppress(ValueError, RecursionError):
        documents.append(json.loads(data))
    for document in documents:
        if isinstance(document, dict):
            with contextlib.suppress(InflightError):
                to_request(parse(document).request)


def tool_calls(data: bytes) -> None:
    """An answer of a model, by every parser of tool calls: its pieces do not change what is found."""
    choices = Choices(data)
    parser = TOOL_CALL_PARSERS[choices.below(len(TOOL_CALL_PARSERS))]
    is_forced, is_cut = bool(choices.below(2)), bool(choices.below(2))
    text = _answer(choices, _MARKS[parser])

    def parsed(parts: list[str]) -> tuple[str, list[list[str]]]:
        stream = tool_call_stream(parser, is_forced)
        deltas = [*map(stream.add, parts), stream.finish(is_cut)]
        calls: list[list[str]] = []
        for delta in deltas:
            for call in delta.tool_calls:
                if call.index == len(calls):
                    calls.append(["", ""])
                calls[call.index][0] += call.name
                calls[call.index][1] += call.arguments
        return "".join(delta.content for delta in deltas), calls

    whole = parsed([text])
    assert parsed(list(text)) == parsed(_pieces(text, data)) == whole
    assert whole[1] or is_cut or whole[0] == text


_CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "commentary to=functions.f", "final")


def reasoning(data: bytes) -> None:
    """An answer of a model, by every parser of reasoning: its pieces do not change what is found."""
    choices = Choices(data)
    parser = REASONING_PARSERS[choices.below(len(REASONING_PARSERS))]
    begins_inside, is_cut = bool(choices.below(2)), bool(choices.below(2))
    form = REASONING_FORMATS[parser]
    marks = (*_CHANNELS, form.begin) if form.has_channels else (form.begin, form.closing)
    text = _answer(choices, (*marks, form.end, *form.skipped))

    def parsed(parts: list[str]) -> tuple[str, str]:
        stream = reasoning_stream(parser, begins_inside)
        both = [*map(stream.add, parts), stream.finish(is_cut)]
        return "".join(thought for thought, _ in both), "".join(content for _, content in both)

    assert parsed(list(text)) == parsed(_pieces(text, data)) == parsed([text])


def _answer(choices: Choices, marks: Sequence[str]) -> str:
    """Return a text of marks, parts of marks, JSON and single characters."""
    parts: list[str] = []
    while not choices.is_used_up:
        chosen = choices.below(256)
        if chosen < 96:
            mark = marks[chosen % len(marks)]
            parts.append(mark if chosen < 64 else mark[: choices.below(len(mark) + 1)])
        elif chosen < 160:
            parts.append(_FRAGMENTS[chosen % len(_FRAGMENTS)])
        else:
            parts.append(chr(choices.below(0x3000)))
    return "".join(parts)


def _pieces(text: str, data: bytes) -> list[str]:
    """Return the text in pieces whose lengths are the input's bytes."""
    parts, at = [], 0
    for byte in data:
        parts.append(text[at : at + byte % 16])
        at += byte % 16
    return [*parts, text[at:]]


_FRAGMENTS = (
    "{", "}", "[", "]", ",", ":", ";", "(", ")", '"', "'", "\\", "\n", " ", "=", "<", ">", "|", "0", "-1.5",
    "null", "true", "True", "f", "name", '{"name": "f", ', '"arguments": {', '"parameters": {', '{"a": 1}', '"x"',
    "a=1", "f(a='b')",
)  # fmt: skip


def _marks(parser: str) -> tuple[str, ...]:
    form = TOOL_FORMATS[parser]
    texts = [form.begin, form.end, form.separator, form.call_begin, form.name_end, form.call_end, form.quote]
    if form.tags is not None:
        texts += [form.tags.key_begin, form.tags.key_end, form.tags.value_begin, form.tags.value_end]
        texts.append(form.tags.text_key_end)
    return tuple(filter(None, texts)) or ("f",)


_MARKS = {parser: _marks(parser) for parser in TOOL_CALL_PARSERS}
_TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 4, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
    ],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "x"}]},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": {"a": 0, "b": 1, "ab": 2, "\u0120": 3}, "merges": [["a", "b"]],
    },
}  # fmt: skip
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "<s>"},
    "add_bos_token": True, "chat_template": "{{ messages }}", "clean_up_tokenization_spaces": False,
    "added_tokens_decoder": {"4": {"content": "<s>", "special": True}}, "additional_special_tokens": ["<s>"],
}  # fmt: skip
_PEFT_CONFIG = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none", "use_dora": False,
    "use_rslora": False, "fan_in_fan_out": False, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {},
    "modules_to_save": None, "layers_to_transform": None, "task_type": "CAUSAL_LM",
}  # fmt: skip
_PEFT_TENSORS = save(
    {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{each}.weight": torch.ones(shape)
     for each, shape in (("A", (2, 8)), ("B", (8, 2)))}
)  # fmt: skip
torch.save({"fc.weight": torch.ones(2, 6), "d2t": torch.arange(4)}, _SCRATCH / PICKLED)
with ZipFile(_SCRATCH / PICKLED) as _archive:
    _PICKLE = _archive.read("pytorch_model/data.pkl")
_RECEIPT = make_document()


def _body(message: bytes | memoryview) -> Any:
    return msgspec.msgpack.decode(memoryview(message)[frames.LENGTH_BYTES :])


_ROWS = Matrix((2, 4), "float32", RawBuffer(bytes(32)))
_LOGITS = FloatTensor((2, 4), bytes(32))
_BUFFER_BYTES = 64
"""Bytes of the raw buffers of _SUBMIT, and of the tensors of _RESPONSE."""
_SUBMIT = _body(
    frames.encode_submit(
        Request(
            1,
            (5, 6),
            3,
            lora=LoraRequest(task_id=3, weights=LoraWeights(_ROWS, ((0, 0, 1), (1, 0, 1)))),
            prompt_table=PromptTable.of(_ROWS),
        )
    )[0]
)
_SHORT_SUBMIT = {
    **_SUBMIT,
    "request": {
        name: _SUBMIT["request"][name]
        for name in ("request_id", "input_token_ids", "max_new_tokens", "lora", "prompt_table")
    },
}
"""Without the fields that have defaults, so that changes often concern the buffers."""
_RESPONSE = _body(
    frames.encode_response(
        Response(
            1,
            make_result(
                5, context_logits=_LOGITS, additional_outputs=(ReturnedOutput("hidden_states", (_LOGITS,)),)
            ),
        )
    )[0]
)


def _gguf() -> bytes:
    path = _SCRATCH / "base.gguf"
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 1), (writer.add_embedding_length, 8), (writer.add_feed_forward_length, 16),
        (writer.add_head_count, 2), (writer.add_head_count_kv, 1), (writer.add_context_length, 64),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 1e4), (writer.add_vocab_size, 4),
        (writer.add_tokenizer_model, "gpt2"), (writer.add_tokenizer_pre, "llama-bpe"),
        (writer.add_token_list, ["a", "b", "ab", "<s>"]), (writer.add_token_types, [1, 1, 1, 3]),
        (writer.add_token_merges, ["a b"]), (writer.add_bos_token_id, 3), (writer.add_eos_token_id, 3),
        (writer.add_chat_template, "{{ messages }}"),
    ):  # fmt: skip
        add(value)
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


_GGUF = _gguf()


def batch_lines(data: bytes) -> None:
    """The input of a batch: a request with changed values and a second one, or any bytes."""
    choices = Choices(data)
    good = {**_BATCH_LINE, "custom_id": "good"}
    content = json.dumps(changed(_BATCH_LINE, choices)).encode() + b"\n" + json.dumps(good).encode()
    for each in (content, edited(content, choices), data):
        with contextlib.suppress(InflightError):
            for request in read_requests(io.BytesIO(each)):
                request.encoded_body()


_BATCH_LINE: dict[str, Any] = {
    "custom_id": "one",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4},
}


def server_sent_events(data: bytes) -> None:
    """Texts in the events of a stream: the official client finds the same events, however they are divided."""
    text = data.decode("utf-8", "replace")
    texts = [text, *text.split("\n")]
    stream = b"".join(event({"text": each}, "delta" * (at % 2)) for at, each in enumerate(texts))
    pieces, at = [], 0
    for byte in data:
        pieces.append(stream[at : at + byte])
        at += byte
    for parts in ([stream], [*pieces, stream[at:]]):
        found = [json.loads(each.data)["text"] for each in SSEDecoder().iter_bytes(iter(parts))]
        assert found == texts


def chat_events(data: bytes) -> None:
    """The stream of an answer, read by the package's own client: an event with changes, or any bytes."""
    event_of_chat = b"data: " + json.dumps(changed(_CHAT_EVENT, Choices(data))).encode()
    for stream in (event_of_chat, edited(event_of_chat, Choices(data)), data):
        with contextlib.suppress(ValueError):
            list(read_texts(io.BytesIO(stream)))


_CHAT_EVENT: dict[str, Any] = {"choices": [{"delta": {"content": "text"}}], "error": {"message": "text"}}


def picture_url(data: bytes) -> None:
    """URLs of pictures, by the operator's rules that allow the least: any text, and data: URLs with changes."""
    for url in (
        data.decode("latin-1"),
        edited(b"data:image/png;base64,aGVsbG8=", Choices(data)).decode("latin-1"),
    ):
        reading = read_picture(url, Name("url"), SourceRules())
        with contextlib.suppress(InflightError):
            asyncio.run(reading)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        endpoint_frames, endpoint_stream, endpoint_submit, endpoint_response,
        config_json, config_text, safetensors_header, pickled_header, tokenizer_json, gguf_file,
        peft_folder, lora_files, config_pbtxt, receipt, tool_calls, reasoning, batch_lines,
        server_sent_events, chat_events, picture_url,
    )
}  # fmt: skip
