"""Determine a prompt's outputs from the output names that the client requested and from the prompt's flags."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from inflight.additional_outputs import outputs_of_tensors
from inflight.core.request.request import OutputOptions
from inflight.errors import InvalidArgument, Name
from inflight.tensors.output_table import OUTPUTS, is_additional
from inflight.tensors.reader import TensorReader
from inflight.tensors.spec import TensorSpec, Vocabulary

_ID_OUTPUTS = frozenset({"output_ids", "sequence_length"})
_TOP_OUTPUTS = frozenset({"top_log_prob_ids", "top_log_probs"})
_LOG_PROB_OUTPUTS = frozenset({"output_log_probs", "cum_log_probs", "cumulative_logprob"})
_METRIC_OUTPUTS = frozenset(spec.name for spec in OUTPUTS.specs if spec.asked_by == "return_perf_metrics")


@dataclass(frozen=True, slots=True)
class Naming:
    """The outputs that a client names in its request (Triton's requested outputs).

    The response has exactly these outputs. A named output that needs a flag is an empty tensor if the flag
    is not set, because a Triton ensemble names every output that it passes on, wanted or not. A client that
    names no outputs, as with HTTP generate, gets the outputs whose flags are set.

    Attributes:
        requested: Names of outputs; all outputs of the model if the client named none.
        named: Whether the client named outputs.
    """

    requested: frozenset[str]
    named: bool

    @classmethod
    def from_triton(
        cls, requested: frozenset[str], vocabulary: Vocabulary, declared: Collection[str] = ()
    ) -> Naming:
        """Create from Triton's list of requested outputs, which has all outputs if the client named none.

        Args:
            requested: Names of outputs.
            vocabulary: The model's vocabulary of names.
            declared: Names of the outputs in the model's config.pbtxt, including those that the parameter
                additional_model_outputs adds; if empty, the names of the table.
        """
        names = [name for name, _ in OUTPUTS.declared(vocabulary)]
        known = frozenset([*names, *filter(is_additional, declared)])
        return cls(requested & known, requested & known != (known & frozenset(declared) or known))


def wanted_outputs(
    reader: TensorReader, naming: Naming, tells_prompts_apart: bool, tells_sequences_apart: bool
) -> frozenset[str]:
    """Return the names of the outputs to return.

    Additional outputs are requested by their names, or by the tensor additional_outputs.

    Args:
        reader: One prompt's tensors, which include the flags.
        naming: The outputs that the client named.
        tells_prompts_apart: Whether several prompts get separate responses.
        tells_sequences_apart: Whether several sequences get separate responses.
    """
    left_out: set[str] = set()
    if reader.boolean("return_finish_reason") is False:
        left_out.add("finish_reason")
    if not (tells_prompts_apart or naming.named):
        left_out.add("batch_index")
    if not (tells_sequences_apart or naming.named):
        left_out.add("sequence_index")
    return frozenset(
        spec.name
        for spec in OUTPUTS.specs
        if spec.name in naming.requested
        and spec.name not in left_out
        and spec.built
        and _is_asked_for(spec, reader)
    ).union(_additional_outputs(reader, naming))


def _additional_outputs(reader: TensorReader, naming: Naming) -> Iterator[str]:
    """Yield the additional outputs that the client named.

    If it named none, yield those in the tensor additional_outputs.

    Raises InvalidArgument if the tensor has a name that the model does not declare.
    """
    if naming.named:
        yield from filter(is_additional, naming.requested)
        return
    for name in filter(None, reader.texts("additional_outputs")):
        if name not in naming.requested or not is_additional(name):
            known = ", ".join(sorted(filter(is_additional, naming.requested))) or "none"
            raise InvalidArgument(
                Name("additional_outputs"),
                f" has {name[:100]!r}, expected names of this model's additional outputs: "
                f"{known} (parameter additional_model_outputs)",
            )
        yield name


def output_config(reader: TensorReader, wanted: frozenset[str], exclude_input: bool) -> OutputOptions:
    """Return the engine's output options for the outputs in `wanted`: which values to keep and send."""
    return OutputOptions(
        # Without these outputs the prompt's ids are not used and need not be returned.
        exclude_input_from_output=exclude_input or not wanted & _ID_OUTPUTS,
        return_log_probs=bool(wanted & _LOG_PROB_OUTPUTS),
        num_top_log_probs=(reader.integer("num_top_log_probs") or 0) if wanted & _TOP_OUTPUTS else 0,
        return_prompt_log_probs="prompt_log_probs" in wanted,
        return_context_logits="context_logits" in wanted,
        return_generation_logits="generation_logits" in wanted,
        return_perf_metrics=bool(wanted & _METRIC_OUTPUTS),
        return_receipt="receipt" in wanted,
        additional_outputs=outputs_of_tensors(sorted(filter(is_additional, wanted))),
    )


def _is_asked_for(spec: TensorSpec, reader: TensorReader) -> bool:
    if spec.asked_by == "num_top_log_probs":
        return bool(reader.integer(spec.asked_by))
    if spec.asked_by == "lora_command":
        return bool(reader.text(spec.asked_by))
    return not spec.asked_by or bool(reader.boolean(spec.asked_by))
