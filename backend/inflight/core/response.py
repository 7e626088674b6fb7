"""What goes back to a front end, and how waiting responses of one stream are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from inflight.core.stop import CUT_SHORT, FinishReason
from inflight.errors import InflightError


@dataclass(frozen=True, slots=True)
class Result:
    """TensorRT-LLM's `Result` for one sequence.

    Attributes:
        output_token_ids: Streaming: the tokens since the last response. Otherwise: the prompt, unless excluded,
            and everything generated. End ids are not returned. Tensor `output_ids`.
        num_input_tokens: Prompt tokens. Tensor `num_input_tokens`.
        num_output_tokens: Generated tokens in this response. Tensor `num_output_tokens`.
        finish_reason: NOT_FINISHED until the sequence's last response. Tensor `finish_reason`.
    """

    output_token_ids: tuple[int, ...]
    num_input_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason = FinishReason.NOT_FINISHED


@dataclass(frozen=True, slots=True)
class Response:
    """One call of the SendResponse callback. Specification: Get and Send Callbacks.

    Attributes:
        request_id: Whose response it is.
        result: The outputs, or None with an error.
        error: Why the request failed; then `is_final` is true.
        is_final: Whether this is the request's last response. Its id may be used again afterwards.
    """

    request_id: int
    result: Result | None = None
    error: InflightError | None = None
    is_final: bool = False


def merge_responses(responses: Sequence[Response]) -> Response:
    """One response that says what consecutive responses of one request say together.

    Tokens that were waiting when an error or a cancellation came are dropped: it is the request's last word.
    """
    last = responses[-1]
    if len(responses) == 1 or last.result is None or last.result.finish_reason in CUT_SHORT:
        return last
    results = [response.result for response in responses if response.result is not None]
    joined = replace(
        last.result,
        output_token_ids=tuple(chain.from_iterable(result.output_token_ids for result in results)),
        num_output_tokens=sum(result.num_output_tokens for result in results),
    )
    return replace(last, result=joined)
