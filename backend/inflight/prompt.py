"""A prompt of a client's request as front ends know it, and what is to be sent for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.additional_outputs import OfferedOutput
from inflight.core.request.request import Request
from inflight.core.request.response import SequenceResult


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """The facts that the reply to a prompt depends on and the engine need not know.

    Attributes:
        outputs: What the client wants back, by the names of its protocol.
        named: What the client has named, be it wanted or not; what is not wanted comes without elements.
        streaming: Whether the client wants responses as they come. The engine may stream all the same.
        prompt_text: The prompt as it came, None if it came as ids.
        include_prompt: Whether the text starts with the prompt.
        stop_strings: Texts that end the output.
        min_tokens: Tokens before the first one that may complete a stop string.
        vocab_size: Values in a row of logits; ids from there on are rows of a prompt table.
        offered: The engine's additional outputs.
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
    """Return whether the engine has to answer as tokens come, be it that only the server looks at them.

    Where text ends a sequence, the server looks for it while the sequence is being made. Beams are looked at when
    the search has ended, as they change until then.

    Args:
        streaming: Whether the client wants responses as they come.
        stop_strings: Texts that end the output.
        uses_beams: Whether it is a beam search.
    """
    return streaming or (bool(stop_strings) and not uses_beams)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a client's request.

    Attributes:
        request: For the engine; its `request_id` is 0: the engine client gives it one.
        options: For its reply.
    """

    request: Request
    options: ReplyOptions


@dataclass(frozen=True, slots=True)
class Output:
    """One part of a response: a prompt's sequence, its beams, or all of its sequences.

    Attributes:
        prompt: What was asked.
        result: The tokens and what belongs to them, a row for each beam or sequence.
        texts: The text of each row; None if there is no text.
        batch_index: Which of the request's prompts it is.
    """

    prompt: Prompt
    result: SequenceResult
    texts: tuple[str, ...] | None
    batch_index: int = 0
