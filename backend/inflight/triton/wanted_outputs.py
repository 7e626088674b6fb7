"""Which outputs a request gets, and what the engine has to keep for them.

A client that names outputs gets exactly those, and naming one is asking for it: its return_* flag need not be set.
A client that names none, as HTTP generate never does, gets what the flags say. Runs on the thread that calls
execute.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from inflight.core.request.request import OutputConfig
from inflight.triton.tensor_reader import TensorReader
from inflight.triton.tensor_spec import TensorSpec, Vocabulary
from inflight.triton.tensors import OUTPUTS

BATCH_INDEX, SEQUENCE_INDEX = "batch_index", "sequence_index"
_ID_OUTPUTS = frozenset({"output_ids", "sequence_length"})
_TOP_OUTPUTS = frozenset({"top_log_prob_ids", "top_log_probs"})
_LOG_PROB_OUTPUTS = frozenset({"output_log_probs", "cum_log_probs", "cumulative_logprob"})
_METRIC_OUTPUTS = frozenset(spec.name for spec in OUTPUTS.specs if spec.asked_by == "return_perf_metrics")


@dataclass(frozen=True, slots=True)
class Naming:
    """What a client says of the outputs it wants, beside the flags.

    Attributes:
        requested: Names of outputs; all of the model's if the client named none.
        named: Whether it named them.
    """

    requested: frozenset[str]
    named: bool

    @classmethod
    def of(cls, requested: frozenset[str], vocabulary: Vocabulary, declared: Collection[str] = ()) -> Naming:
        """From what Triton says: all outputs of the model stand for none named.

        Args:
            requested: Names of outputs.
            vocabulary: Whose names the model goes by.
            declared: Names of the outputs in its config.pbtxt; without any, those of the table.
        """
        known = {name for name, _ in OUTPUTS.declared(vocabulary)}
        return cls(requested & known, requested & known != (known & frozenset(declared) or known))


def wanted_outputs(
    reader: TensorReader, naming: Naming, tells_prompts_apart: bool, tells_sequences_apart: bool
) -> frozenset[str]:
    """Names of the outputs to return, as far as there is something to say.

    Args:
        reader: One prompt's tensors, for the flags.
        naming: What the client named.
        tells_prompts_apart: Whether responses of several prompts come one by one.
        tells_sequences_apart: Whether responses of several sequences do.
    """
    if naming.named:
        return naming.requested
    left_out = set()
    if reader.boolean("return_finish_reason") is False:
        left_out.add("finish_reason")
    if not tells_prompts_apart:
        left_out.add(BATCH_INDEX)
    if not tells_sequences_apart:
        left_out.add(SEQUENCE_INDEX)
    return frozenset(
        spec.name
        for spec in OUTPUTS.specs
        if spec.name in naming.requested
        and spec.name not in left_out
        and spec.built
        and _is_asked_for(spec, reader)
    )


def output_config(reader: TensorReader, wanted: frozenset[str], exclude_input: bool) -> OutputConfig:
    """What the engine has to keep for these outputs."""
    num_top = reader.integer("num_top_log_probs")
    return OutputConfig(
        # Nobody looks at the prompt's ids without these outputs: they need not come back.
        exclude_input_from_output=exclude_input or not wanted & _ID_OUTPUTS,
        return_log_probs=bool(wanted & _LOG_PROB_OUTPUTS),
        num_top_log_probs=(1 if num_top is None else num_top) if wanted & _TOP_OUTPUTS else 0,
        return_prompt_log_probs="prompt_log_probs" in wanted,
        return_context_logits="context_logits" in wanted,
        return_generation_logits="generation_logits" in wanted,
        return_perf_metrics=bool(wanted & _METRIC_OUTPUTS),
    )


def _is_asked_for(spec: TensorSpec, reader: TensorReader) -> bool:
    if spec.asked_by == "num_top_log_probs":
        return bool(reader.integer(spec.asked_by))
    return not spec.asked_by or bool(reader.boolean(spec.asked_by))
