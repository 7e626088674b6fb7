"""`preprocessing` and `postprocessing`: text to token ids and back, for clients that call both steps.

Both models have a tokenizer and answer texts synchronously in `execute`, and requests with pictures later. Owns
the implementation of `execute`, the threads that wait for pictures, and the guard, a process that ends the server
if this process is killed. Triton calls a model on one thread.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.checkpoint_config import CheckpointFacts
from inflight.config import Role
from inflight.errors import Cancelled, InflightError, InvalidArgument, Unsupported, unexpected
from inflight.log_lines import REQUEST_ID
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.server.guard import guard_of_front_end, keep_private
from inflight.server.runtime_directory import note_initialized
from inflight.serving.completion_text import TokenizerFinder
from inflight.serving.in_flight import Ending, error_of_ending
from inflight.tensors.picture_outputs import rotary_outputs, table_outputs
from inflight.tensors.pictures import (
    OF_TEXT_MODELS,
    BlockingEncoder,
    SentPictures,
    has_pictures,
    read_pictures,
)
from inflight.tensors.reader import NUMPY_TYPES, TensorReader, decode_utf8, each_row
from inflight.tensors.request_parameters import TIMEOUT, refuse_unread
from inflight.tensors.requests import NO_ID
from inflight.tensors.sampling import add_word_bias, has_word_bias
from inflight.tensors.spec import TensorTable, Vocabulary
from inflight.tensors.text_model_tables import (
    POSTPROCESSING_INPUTS,
    POSTPROCESSING_OUTPUTS,
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
)
from inflight.tensors.word_lists import pack_words
from inflight.text.text_encoder import TextEncoder
from inflight.text.words import biased_ids
from inflight.triton.host import import_pb_utils, log_to_triton, logged_id, read_model_args
from inflight.triton.input_arrays import input_arrays
from inflight.triton.pictures import PICTURE_THREADS, ServerPictures
from inflight.triton.responses import TritonStream, triton_error

_MAX_ROWS = 1 << 22
"""Largest number of rows of a prompt table if the model's sequence length is unknown. No model has longer
prompts."""

_BIAS_NAMES = ("EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")


class TextModel(ABC):
    """Base class of `preprocessing`, `postprocessing` and `multimodal_encoders`.

    Each request gets one response; an invalid one does not affect the others. Requests with pictures are answered
    by other threads, so that texts do not wait for them.
    """

    role: Role
    inputs: TensorTable
    outputs: TensorTable
    pictures: BlockingEncoder

    def __init__(self) -> None:
        """Start nothing: Triton calls `initialize` next."""
        self._is_ending = Event()
        self.pictures = ServerPictures(self._is_ending.is_set)
        self._threads = ThreadPoolExecutor(PICTURE_THREADS, "inflight-pictures")

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer. Raises ConfigError with every problem found in config.pbtxt."""
        keep_private()
        self._pb_utils = import_pb_utils()
        log_to_triton(self._pb_utils)
        self.parameters = read_model_args(args, self.role).parameters
        self.tokenizers = TokenizerFinder(self.parameters.tokenizer_dir)
        self.tokenizers.find()
        # Last, because Triton does not call finalize if initialize raises.
        self._guard = guard_of_front_end(args["model_name"])
        note_initialized(args["model_name"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return one response for each request, in order; None for a request that is answered later."""
        answers: list[Any] = []
        for request in requests:
            REQUEST_ID.set(logged_id(request))
            answers.append(self._unless_failed(partial(self._answer, request)))
        REQUEST_ID.set("")
        return answers

    def finalize(self) -> None:
        """Answer requests whose pictures are waited for with an error, and dismiss the guard."""
        self._is_ending.set()
        self._threads.shutdown()
        if self._guard is not None:
            self._guard.dismiss()

    @abstractmethod
    def convert(self, rows: Sequence[TensorReader]) -> Mapping[str, Sequence[NDArray[Any]]]:
        """Return one array per row of the batch for each output name. An output's arrays have equal shapes.

        Raises RequestError if the request is invalid.
        """

    def _answer(self, request: Any) -> Any:
        """Return the response to a request; None if it has pictures, after which a thread waits for them."""
        given = json.loads(request.parameters() or "{}")
        refuse_unread(
            given, self.inputs, Vocabulary.TOKENS, (TIMEOUT, *self.parameters.ignored_request_parameters)
        )
        reader = TensorReader(input_arrays(request), self.inputs, Vocabulary.TOKENS)
        reader.refuse_unbuilt()
        rows, wanted = reader.rows(), frozenset(request.requested_output_names())
        if not self._has_pictures(rows):
            return self._response(rows, wanted)
        final_flag = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        stream = TritonStream(request.get_response_sender(), final_flag, self._error)
        later = partial(self._response, [row.detached() for row in rows], wanted)
        in_context = copy_context().run  # so that log lines about the pictures name the request
        self._threads.submit(in_context, lambda: stream.finish(self._unless_failed(later)))
        return None

    def _has_pictures(self, rows: Sequence[TensorReader]) -> bool:
        if OF_TEXT_MODELS.pixels not in self.inputs:
            return False
        return any(each_row([partial(has_pictures, row, OF_TEXT_MODELS) for row in rows]))

    def _response(self, rows: Sequence[TensorReader], wanted: frozenset[str]) -> Any:
        tensors = [
            self._tensor(name, arrays) for name, arrays in self.convert(rows).items() if name in wanted
        ]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def _unless_failed(self, answer: Callable[[], Any]) -> Any:
        """Return what `answer` returns, or the response for the error that it raises."""
        try:
            return answer()
        except Cancelled:  # clients' cancellations are not looked for
            return self._error(error_of_ending(Ending.UNLOAD))
        except InflightError as error:
            return self._error(error)
        except Exception as error:  # a bug that affects one request must not end the others
            return self._error(unexpected(f"{self.role.value} failed", error))

    def _tensor(self, name: str, arrays: Sequence[NDArray[Any]]) -> Any:
        spec = self.outputs[name]
        array = np.stack(arrays) if spec.is_batched else np.concatenate(arrays)
        return self._pb_utils.Tensor(name, array.astype(NUMPY_TYPES[spec.dtype]))

    def _error(self, error: InflightError) -> Any:
        return self._pb_utils.InferenceResponse(output_tensors=[], error=triton_error(self._pb_utils, error))


@dataclass(frozen=True, slots=True)
class _EncodedRow:
    """The token ids of one row of a batch.

    Attributes:
        ids: The prompt.
        extra_ids: One per token, 0 for text; None if the row has neither pictures nor an extra id.
        encoded: The prompt with its pictures, if it has some.
    """

    ids: Sequence[int]
    extra_ids: Sequence[int] | None
    encoded: EncodedPrompt | None = None


class Preprocessing(TextModel):
    """Tokenizes QUERY and the word lists, and copies the other inputs to outputs.

    A batch has one row per prompt. Pictures in IMAGE_BYTES, IMAGE_URL or IMAGES are encoded by the server's
    process for it, and the outputs then have everything that `tensorrt_llm` needs for the prompt.
    """

    role = Role.PREPROCESSING
    inputs = PREPROCESSING_INPUTS
    outputs = PREPROCESSING_OUTPUTS

    def convert(self, rows: Sequence[TensorReader]) -> Mapping[str, Sequence[NDArray[Any]]]:
        """Return the outputs, see TextModel.convert."""
        queries = each_row([partial(_query, row) for row in rows])
        tokenizer = self.tokenizers.require()
        prompts = self._prompts(rows, queries)
        ends = [_first(row.integer("END_ID"), tokenizer.eos_token_id) for row in rows]
        pads = [_first(row.integer("PAD_ID"), tokenizer.pad_token_id, tokenizer.eos_token_id) for row in rows]
        outputs = {
            "INPUT_ID": _filled_up([prompt.ids for prompt in prompts], pads),
            "REQUEST_INPUT_LEN": [np.array([len(prompt.ids)]) for prompt in prompts],
            # tensorrtllm_backend's ensemble passes these outputs on for every prompt, with or without an
            # encoder.
            "DECODER_INPUT_ID": [np.array([pad]) for pad in pads],
            "REQUEST_DECODER_INPUT_LEN": [np.array([1]) for _ in rows],
            "OUT_END_ID": [np.array([end]) for end in ends],
            "OUT_PAD_ID": [np.array([pad]) for pad in pads],
        }
        lengths = [row.integer("REQUEST_OUTPUT_LEN") for row in rows]
        if None not in lengths:
            outputs["REQUEST_OUTPUT_LEN"] = [np.array([length]) for length in lengths]
        outputs |= _virtual_outputs(prompts)
        outputs["EMBEDDING_BIAS"] = self._biases(rows)
        for source, target in (("BAD_WORDS_DICT", "BAD_WORDS_IDS"), ("STOP_WORDS_DICT", "STOP_WORDS_IDS")):
            outputs[target] = _word_lists(
                each_row([partial(row.texts, source) for row in rows]),
                lambda word: tokenizer.encode(word, add_special_tokens=False),
            )
        return outputs

    def _prompts(self, rows: Sequence[TensorReader], queries: Sequence[str]) -> list[_EncodedRow]:
        virtual = each_row([partial(self._virtual_ids, row) for row in rows])
        sent = each_row([partial(read_pictures, row, OF_TEXT_MODELS) for row in rows])
        if any(sent):
            return each_row([partial(self._with_pictures, *row) for row in zip(rows, queries, sent, virtual)])
        texts = TextEncoder(self.tokenizers.require, self.parameters.add_special_tokens).prompts(queries)
        extra_ids = [row.integer("PROMPT_TABLE_EXTRA_ID") for row in rows]
        return [
            _EncodedRow(
                [*first, *text],
                None if extra_id is None else [extra_id] * len(first) + [0] * len(text),
            )
            for first, text, extra_id in zip(virtual, texts, extra_ids, strict=True)
        ]

    def _with_pictures(
        self, row: TensorReader, query: str, sent: SentPictures | None, virtual: range
    ) -> _EncodedRow:
        if sent is None:
            raise InvalidArgument(
                "this prompt has no pictures, but others of the batch have: send separate requests"
            )
        if virtual:
            raise InvalidArgument("got both ", sent.name, " and PROMPT_VOCAB_SIZE: send one of them")
        encoded = sent.encode(
            self.pictures, query, self._vocab_size(sent.name), self.parameters.add_special_tokens
        )
        extra_ids, extra_id = encoded.extra_ids, row.integer("PROMPT_TABLE_EXTRA_ID")
        if extra_id is not None:
            extra_ids = [extra_id if each else 0 for each in extra_ids]
        return _EncodedRow(encoded.token_ids, extra_ids, encoded)

    def _virtual_ids(self, row: TensorReader) -> range:
        """Return the token ids that stand for a prompt table's rows.

        They begin where the model's vocabulary ends.
        """
        num_rows = row.integer("PROMPT_VOCAB_SIZE") or 0
        if not num_rows:
            return range(0)
        facts = self._facts()
        most = min(_MAX_ROWS, facts.longest_sequence or _MAX_ROWS)
        if not 0 <= num_rows <= most:
            raise InvalidArgument(
                f"PROMPT_VOCAB_SIZE must be in [0, {most}], the longest prompt of the model, got {num_rows}"
            )
        first = self._vocab_size("PROMPT_VOCAB_SIZE")
        return range(first, first + num_rows)

    def _vocab_size(self, name: str) -> int:
        """Return the model's vocabulary size. Raises Unsupported, with the tensor that needs it, if unknown."""
        size = self._facts().vocab_size
        if size is None:
            raise Unsupported(
                f"{name} needs the model's vocabulary size, which is unknown: there is no config.json in the "
                "folder gpt_model_path or tokenizer_dir"
            )
        return size

    def _facts(self) -> CheckpointFacts:
        folders = (self.parameters.engine.gpt_model_path, self.parameters.tokenizer_dir)
        return CheckpointFacts.read(*filter(None, folders))

    def _biases(self, rows: Sequence[TensorReader]) -> list[NDArray[Any]]:
        """Return a bias [vocab_size] for each row, or for each an empty bias [0] if no row has biased words."""
        if not any(has_word_bias(row, *_BIAS_NAMES) for row in rows):
            return [np.zeros(0) for _ in rows]
        tokenizer = self.tokenizers.require()
        size = self._facts().vocab_size or tokenizer.vocab_size

        def bias(row: TensorReader) -> NDArray[np.float32]:
            array = np.zeros(size, np.float32)
            add_word_bias(array, row, *_BIAS_NAMES, lambda word: biased_ids(tokenizer, word))
            return array

        return each_row([partial(bias, row) for row in rows])


class Postprocessing(TextModel):
    """Decodes TOKENS_BATCH [batch, beams, n] to OUTPUT [batch × beams], which is flat as in tensorrtllm_backend.

    The model keeps no state between calls, so the text of one chunk of a stream may lack its leading space
    or end inside a character. For streaming, request `text_output` from a serving model instead.
    """

    role = Role.POSTPROCESSING
    inputs = POSTPROCESSING_INPUTS
    outputs = POSTPROCESSING_OUTPUTS

    def convert(self, rows: Sequence[TensorReader]) -> Mapping[str, Sequence[NDArray[Any]]]:
        """Return the outputs, see TextModel.convert."""
        return {"OUTPUT": each_row([partial(self._texts, row) for row in rows])}

    def _texts(self, reader: TensorReader) -> NDArray[np.object_]:
        beams = reader.array("TOKENS_BATCH")
        if beams is None:
            raise InvalidArgument("a value is required for TOKENS_BATCH: it is missing or empty")
        lengths = reader.array("SEQUENCE_LENGTH")
        if lengths is None:
            lengths = np.full(len(beams), beams.shape[1])
        if lengths.shape != (len(beams),) or (lengths < 0).any() or (lengths > beams.shape[1]).any():
            raise InvalidArgument(
                f"SEQUENCE_LENGTH must have one length from 0 to {beams.shape[1]} for each of {len(beams)} beams, "
                f"got {lengths.tolist()}"
            )
        texts = [self._text(ids[:length].tolist()) for ids, length in zip(beams, lengths)]
        return np.array([text.encode("utf-8") for text in texts], dtype=np.object_)

    def _text(self, ids: list[int]) -> str:
        return self.tokenizers.require().decode(ids, skip_special_tokens=self.parameters.skip_special_tokens)


def _virtual_outputs(prompts: Sequence[_EncodedRow]) -> dict[str, list[NDArray[Any]]]:
    """Return the outputs about prompt tables and pictures, if the prompts have them."""
    outputs: dict[str, list[NDArray[Any]]] = {}
    extra_ids = [prompt.extra_ids for prompt in prompts if prompt.extra_ids is not None]
    if len(extra_ids) == len(prompts):
        outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = _filled_up(extra_ids, [0] * len(prompts), np.uint64)
    encoded = [prompt.encoded for prompt in prompts if prompt.encoded is not None]
    return outputs | table_outputs(encoded) | rotary_outputs(encoded) if encoded else outputs


def _query(reader: TensorReader) -> str:
    query = reader.array("QUERY")
    if query is None:
        raise InvalidArgument("a value is required for QUERY: it is missing")
    return decode_utf8(query[0], "QUERY")


def _first(*ids: int | None) -> int:
    return next((token_id for token_id in ids if token_id is not None), NO_ID)


def _filled_up(
    rows: Sequence[Sequence[int]], fillers: Sequence[int], dtype: type[np.generic] = np.int64
) -> list[NDArray[Any]]:
    """Pad each row to shape [n] with the filler of that row; n is the length of the longest row."""
    length = max(map(len, rows))
    return [np.array([*row, *[filler] * (length - len(row))], dtype) for row, filler in zip(rows, fillers)]


def _word_lists(rows: Sequence[Sequence[str]], encode: Callable[[str], Sequence[int]]) -> list[NDArray[Any]]:
    """Return a packed word list of shape [2, n] for each row, padded to the length n of the longest list."""
    packed = [pack_words([encode(word) for word in words if word]) for words in rows]
    ids = _filled_up([list(array[0]) for array in packed], [0] * len(packed))
    ends = _filled_up([list(array[1]) for array in packed], [-1] * len(packed))
    return [np.stack(pair) for pair in zip(ids, ends)]
