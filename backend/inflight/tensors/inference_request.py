"""TensorRT-LLM's `InferenceRequest`, a map of tensors, for programs that use GptManager as a library.

The tensors are interpreted by `requests`, as for a served model. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from inflight.core.request.engine_description import EngineDescription, ModelLimits
from inflight.core.request.request import Request
from inflight.errors import InvalidArgument, Name, Unsupported
from inflight.near_words import nearest
from inflight.prompt import Prompt
from inflight.tensors.input_table import INPUTS
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.reader import TensorReader
from inflight.tensors.request_kind import RequestKind, request_kind
from inflight.tensors.requests import ServingContext, convert
from inflight.tensors.spec import Vocabulary
from inflight.tensors.wanted_outputs import Naming
from inflight.text.text_encoder import NO_TEXT


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request to a GptManager.

    Attributes:
        request_id: Unique among requests in flight, 0 .. 2**64 - 1.
        tensors: numpy arrays by name; docs/tensors.md lists names and data types. The batch dimension is
            optional: word lists have shape [2, n] or [1, 2, n], ids [n] or [1, n], scalars [1, 1], [1] or
            []. `executor.trtllm_gpt_manager` also takes torch tensors.
    """

    request_id: int
    tensors: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_request(self, limits: ModelLimits) -> Request:
        """Return the Request for a GptManager's GetInferenceRequests callback.

        Arguments and errors as in `to_prompt`.
        """
        return self.to_prompt(limits).request

    def to_prompt(self, limits: ModelLimits) -> Prompt:
        """Convert the tensors to a Request and the names of its outputs.

        Args:
            limits: Limits of the scheduler that the GptManager runs (`Scheduler.limits`).

        Raises:
            InvalidArgument: A name, type, shape or value is wrong; the message names the tensor.
            Unsupported: A tensor is not implemented, or needs a tokenizer, which a GptManager does not have.
        """
        for name in self.tensors:
            self._check_name(name)
        rows = TensorReader(self.tensors, INPUTS, Vocabulary.TOKENS).rows()
        kind = request_kind(rows)
        if kind is not RequestKind.GENERATE:
            raise InvalidArgument(_REFUSED[kind])
        prompt, *others = convert(rows, _context(limits))
        if others:
            raise InvalidArgument(
                f"the tensors have {1 + len(others)} rows: make an InferenceRequest for each"
            )
        if prompt.options.stop_strings:
            raise Unsupported(
                Name("stop_words"),
                " is text, and there is no tokenizer here: send ",
                Name("stop_words_list"),
            )
        return replace(prompt, request=replace(prompt.request, request_id=self.request_id))

    def _check_name(self, name: str) -> None:
        names = [known for known, _ in INPUTS.declared(Vocabulary.TOKENS)]
        if name not in names:
            near = nearest(name, names)
            hint = f"; did you mean {near}?" if near else ""
            raise InvalidArgument(f"there is no tensor {name!r}{hint}")


_REFUSED = {
    RequestKind.STOP: "stop is true: a request is ended by the PollStopSignal callback",
    RequestKind.STATE: "state is true: call GptManager.state instead",
    RequestKind.ADAPTERS: "lora_command: a GptManager does not support adapter commands",
}
_FLAGS_DECIDE = Naming(frozenset(spec.name for spec in OUTPUTS.specs), named=False)


def _context(limits: ModelLimits) -> ServingContext:
    return ServingContext(
        EngineDescription(limits),
        decoupled=True,
        exclude_input_in_output=False,
        naming=_FLAGS_DECIDE,
        encoder=NO_TEXT,
    )
