"""What goes back to a front end, and how waiting responses of one stream are joined."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def merge_responses(earlier: Response, later: Response) -> Response:
    """One response that says what `earlier` and `later`, consecutive deltas of one stream, say together.

    Tokens that were waiting when an error or a cancellation came are dropped: it is the request's last word.
    """
    if later.result is None or earlier.result is None or later.result.finish_reason in CUT_SHORT:
        return later
    joined = replace(
        later.result,
        output_token_ids=earlier.result.output_token_ids + later.result.output_token_ids,
        num_output_tokens=earlier.result.num_output_tokens + later.result.num_output_tokens,
    )
    return replace(later, result=joined)
