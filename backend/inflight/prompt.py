"""A prompt of a client's request as front ends use it, and the parts of its reply. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.additional_outputs import OfferedOutput
from inflight.core.request.request import Request
from inflight.core.request.response import SequenceResult


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """Facts that the reply to a prompt depends on and that the engine does not need.

    Attributes:
        outputs: Names, in the client's protocol, of the wanted outputs.
        named: Names of all outputs that the client mentioned; unwanted ones are returned without elements.
        streaming: Whether the client wants responses during generation. The engine may stream in any case.
        prompt_text: The prompt's text; None if it came as ids.
        include_prompt: Whether the output text starts with the prompt.
        stop_strings: Texts that end the output.
        min_tokens: Number of tokens before the first one that may complete a stop string.
        vocab_size: Width of a row of logits; ids from there on are rows of a prompt table.
        offered: The additional outputs that the engine offers.
    """

    outputs: frozenset[str]
    named: frozenset[str] = frozenset()
    streaming: bool = False
    prompt_text: str | None = None
    include_prompt: bool = False
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    vocab_size: int = 0
    offered: tuple[OfferedOutput, ...] = ()


def engine_streams(streaming: bool, stop_strings: tuple[str, ...], uses_beams: bool) -> bool:
    """Return whether the engine has to stream, even if only the server reads the stream.

    With stop strings, the server searches the text during generation. With beams it searches when the beam
    search has ended, because beams change until then.

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
        options: Options of its reply.
    """

    request: Request
    options: ReplyOptions


@dataclass(frozen=True, slots=True)
class Output:
    """One part of a response: a prompt's sequence, its beams, or all of its sequences.

    Attributes:
        prompt: The prompt that is answered.
        result: Tokens and their log probs and other outputs, with a row per beam or sequence.
        texts: The text of each row; None if there is no text.
        batch_index: Index of the prompt in its request.
    """

    prompt: Prompt
    result: SequenceResult
    texts: tuple[str, ...] | None
    batch_index: int = 0
