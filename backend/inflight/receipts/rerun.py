"""Runs a receipt's request again: alone, in an engine in this process, with the receipt's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from inflight import hub
from inflight.build import check_parameters, start_engine
from inflight.config import Parameters
from inflight.core.ports import EngineClient
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.response import Response
from inflight.core.request.stop import CUT_SHORT, StopReason
from inflight.endpoint.delivery import Delivery
from inflight.errors import InvalidArgument, StepFailed
from inflight.parameter_reader import read_parameters
from inflight.parameter_spec import Role
from inflight.prompt import Prompt, ReplyOptions, engine_streams
from inflight.receipts.document import Receipt, parse, to_request
from inflight.receipts.engine_part import PARAMETERS, model_folders
from inflight.receipts.model_files import ModelFiles
from inflight.serving.reply import Reply, new_text
from inflight.text.tokenizer import Tokenizer

CUT_OUTPUTS = frozenset(reason.name for reason in CUT_SHORT)
"""Finish reasons of outputs that a client or a deadline ended."""
_DEMO_MODEL = "demo_model"
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size")
_ADAPTER = "receipt"


@dataclass(frozen=True, slots=True)
class Sources:
    """The model and the adapter of a re-run, of which a receipt has digests only.

    Attributes:
        repository: The model repository, which has the demo model.
        model: Folder, GGUF file or name on the hub; None: the demo model.
        revision: Branch, tag or commit on the hub.
        adapter: Folder of the request's adapter, in PEFT's format; None: not given.
        settings: Parameters by key that replace the receipt's.
    """

    repository: Path
    model: str | None = None
    revision: str | None = None
    adapter: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


class Rerun:
    """A receipt's request, ready to be run again.

    Args:
        receipt: The receipt.
        sources: The model and the adapter.

    Raises:
        InvalidArgument: The request cannot be run again from the receipt, for the given reason.
        ConfigError: The model is not found, or a setting is not valid.
    """

    def __init__(self, receipt: Receipt, sources: Sources) -> None:
        form = receipt.request
        if receipt.cannot_rerun:
            raise InvalidArgument(receipt.cannot_rerun)
        self._receipt = receipt
        self._request = to_request(form)
        if self._request.sampling.uses_beams and any(
            output.finish_reason in CUT_OUTPUTS for output in receipt.outputs
        ):
            raise InvalidArgument("the beam search was stopped, and its beams may change until its end")
        self._version = sources.repository / "tensorrt_llm" / "1"
        self._model = _find_model(receipt, sources)
        self._parameters = _parameters(receipt, self._request, self._model, sources.settings)
        if form.adapter is not None:
            if sources.adapter is None:
                raise InvalidArgument("the request has an adapter: name its folder with --lora FOLDER")
            adapters = ((_ADAPTER, str(sources.adapter.resolve())),)
            self._parameters = replace(self._parameters, lora_adapters=adapters)
            self._request = replace(self._request, lora=LoraRequest(name=_ADAPTER))

    def files(self) -> dict[str, str]:
        """Return the digest of each file of the model, by name; reads all files."""
        model = self._model or str(self._version / _DEMO_MODEL)
        return ModelFiles(model_folders(self._parameters, model)).digests(trusts_cache=False)

    def run(self) -> Receipt:
        """Load the engine, run the request, and return the receipt of this run.

        Raises:
            InflightError: The model cannot be loaded, or the request fails.
        """
        check_parameters(self._parameters)
        engine = start_engine(self._parameters, str(self._version))
        try:
            return parse(json.loads(self._answer(engine.client)))
        finally:
            engine.close(0.0)

    def _answer(self, client: EngineClient) -> str:
        """Run the request as a front end does; return its receipt as JSON."""
        form, described = self._receipt.request, client.describe()
        request = replace(
            self._request,
            streaming=engine_streams(False, form.stop_strings, self._request.sampling.uses_beams),
            output=OutputOptions(exclude_input_from_output=True, return_receipt=True),
        )
        request.validate(described.limits)
        options = ReplyOptions(
            frozenset(),
            stop_strings=form.stop_strings,
            min_tokens=form.min_tokens,
            skip_special_tokens=form.skip_special_tokens,
        )
        prompt = Prompt(request, options)
        text = None
        if form.stop_strings:
            text = new_text(prompt, Tokenizer.from_dir(described.tokenizer_dir))
        reply = Reply([(prompt, text)], in_one=True)
        # Responses are not merged, because with some tokenizers the token that completes a stop string would
        # then depend on timing.
        delivery: Delivery[Response] = Delivery(merges=False)
        handle = client.submit(request, delivery.put)
        while True:
            for response in delivery.take():
                if response.result is None:
                    raise response.error or StepFailed("the engine gave no result")
                outputs = reply.add(0, response.result, response.is_final)
                if response.is_final:
                    return str(outputs[0].result.receipt)
                if reply.has_just_stopped:
                    handle.stop(StopReason.STOP_WORDS, response.result.sequence_index)


def _find_model(receipt: Receipt, sources: Sources) -> str:
    """Return the folder of the model; "" for the demo model."""
    if sources.model is not None:
        return str(hub.find_checkpoint(sources.model, sources.revision).resolve())
    if receipt.model.name != _DEMO_MODEL:
        raise InvalidArgument(f"the model is {receipt.model.name}: name its folder with --model DIR")
    return ""


def _parameters(receipt: Receipt, request: Request, model: str, settings: Mapping[str, str]) -> Parameters:
    others = receipt.engine.parameters.keys() - PARAMETERS
    if others:  # a receipt may come from anyone, and other parameters write files or connect to hosts
        raise InvalidArgument(f"engine.parameters has {min(others)}, which this version does not write there")
    given = {key: text for key, text in receipt.engine.parameters.items() if key not in _RANKS}
    # A prompt of any length is accepted, and all sequences of the request run at a time.
    given |= {"gpt_model_path": model, "enable_chunked_context": "true", **settings}
    sampling = request.sampling
    config = {
        "name": "the receipt",
        "max_batch_size": max(sampling.beam_width, sampling.num_sequences),
        "parameters": {key: {"string_value": text} for key, text in given.items()},
    }
    return read_parameters(config, Role.ENGINE)
