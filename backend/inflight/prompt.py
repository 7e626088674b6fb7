"""The classes with which front ends represent a prompt of a client's request, and the outputs of its reply."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.additional_outputs import OfferedOutput
from inflight.core.request.request import Request
from inflight.core.request.response import SequenceResult


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """Options of the reply to a prompt that the engine does not need.

    Attributes:
        outputs: Names, in the client's protocol, of the outputs to return.
        named: Names of all outputs that the client named. Those not in `outputs` are returned as empty
            tensors.
        streaming: Whether the client wants responses during generation. The engine may stream in any case.
        prompt_text: The prompt's text; None if the client sent ids.
        include_prompt: Whether the output text starts with the prompt.
        stop_strings: Texts that end the output.
        min_tokens: A stop string is ignored if one of the first `min_tokens` tokens completes it.
        skip_special_tokens: Whether special tokens are left out of the text, in which stop strings are searched.
        vocab_size: Number of logits in a row. Ids from this number on are rows of a prompt table.
        offered: The additional outputs that the engine offers.
    """

    outputs: frozenset[str]
    named: frozenset[str] = frozenset()
    streaming: bool = False
    prompt_text: str | None = None
    include_prompt: bool = False
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    vocab_size: int = 0
    offered: tuple[OfferedOutput, ...] = ()


def engine_streams(streaming: bool, stop_strings: tuple[str, ...], uses_beams: bool) -> bool:
    """Return whether the engine must stream a request.

    It must if the client gets a stream, or there are stop strings, for which the server searches the text
    during generation. For a beam search the server searches at the end, because beams change until then.

    Args:
        streaming: Whether the client wants responses during generation.
        stop_strings: Texts that end the output.
        uses_beams: Whether the request is a beam search.
    """
    return streaming or (bool(stop_strings) and not uses_beams)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a client's request.

    Attributes:
        request: The engine's request; its `request_id` is 0 until the engine client assigns one.
        options: Options of the reply.
    """

    request: Request
    options: ReplyOptions


@dataclass(frozen=True, slots=True)
class Output:
    """The part of a response that belongs to one prompt: one of its sequences, its beams, or all of its sequences.

    Attributes:
        prompt: The prompt.
        result: Tokens, log probs and other outputs, with one row for each beam or sequence.
        texts: The text of each row; None if there is no text.
        batch_index: Index of the prompt in its request.
        stop_string: The stop string that has ended the sequence; "" for none, and for beams.
    """

    prompt: Prompt
    result: SequenceResult
    texts: tuple[str, ...] | None
    batch_index: int = 0
    stop_string: str = ""
