"""The steps of loading that do not depend on what computes the layers. Loading thread."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from inflight.config import EngineConfig
from inflight.engine.capacity import count_snapshots, find_device, make_limits, offer_outputs, set_threads
from inflight.engine.cuda.graph_capture import agree_on_capture, find_capture
from inflight.engine.cuda.iteration_graphs import Capture
from inflight.engine.debug_tensors import DebugTensors
from inflight.engine.draft_costs import NO_COSTS, DraftCosts
from inflight.engine.interfaces import BlockCache, DraftGuesser, RunnerDecoder
from inflight.engine.load_options import LoadOptions
from inflight.engine.runner import ModelRunner
from inflight.models import DecoderConfig
from inflight.models.sharding import Part

_logger = logging.getLogger(__name__)


def prepare_device(config: EngineConfig) -> torch.device:
    """Check the parameters, set the number of threads, and return the device."""
    config.validate()
    device = find_device(config.device)
    set_threads(config.engine_threads)
    return device


class RankLoader:
    """Assembles a rank's runner. The constructor makes the checks that take no time.

    Args:
        options: The configuration and the rank.
        decoder: Configuration of the whole model.
        max_sequence_length: Maximum number of tokens of a sequence.
        device: The device on which the rank computes.

    Attributes:
        options: The argument of the same name.
        config: The configuration of `options`.
        device: The argument of the same name.
        max_sequence_length: The argument of the same name.
        part: The rank's part of the model.
        held: Configuration of this part.
    """

    def __init__(
        self, options: LoadOptions, decoder: DecoderConfig, max_sequence_length: int, device: torch.device
    ) -> None:
        mapping = options.mapping
        self.options, self.config, self.device = options, options.config, device
        self.max_sequence_length = max_sequence_length
        self.part = Part.from_mapping(mapping, decoder)
        self.held = self.part.held_config(decoder)
        self._decoder_config = decoder
        self._offered = offer_outputs(self.config, decoder, mapping)
        self._debug_tensors = DebugTensors.from_config(self.config, mapping.pp_rank, mapping.tp_rank)

    def find_graphs(self, has_fixed_shapes: bool) -> Capture | None:
        """Return the recorder of CUDA graphs; None unless all ranks record iterations."""
        has_debug_tensors = self._debug_tensors is not None
        capture = find_capture(
            self.config, has_fixed_shapes, self.options.mapping, self.device, has_debug_tensors
        )
        return agree_on_capture(capture, self.device, self.options.min_over_ranks)

    def make_runner(
        self,
        decoder: RunnerDecoder,
        cache: BlockCache,
        num_adapter_pages: int,
        capture: Capture | None,
        shares_blocks: bool = True,
        has_bidirectional_attention: bool = True,
        draft_head: DraftGuesser | None = None,
        draft_costs: DraftCosts = NO_COSTS,
    ) -> ModelRunner:
        """Assemble the runner; on a GPU, record iterations.

        Without bidirectional attention there are no prompt tables for a model whose pictures need it.
        """
        limits = make_limits(
            self.config,
            self._decoder_config,
            self.max_sequence_length,
            cache.num_blocks,
            num_adapter_pages,
            self.device,
            self.options.mapping,
            count_snapshots(self.config, self._decoder_config),
        )
        limits = replace(
            limits,
            logits_post_processors=self.options.post_processor_names,
            additional_outputs=self._offered,
            shares_blocks=shares_blocks,
            guess_cost=draft_costs.guess,
            entry_cost=draft_costs.entry,
            hidden_size=limits.hidden_size if has_bidirectional_attention or not limits.has_spans else 0,
        )
        if draft_head is not None and not limits.has_useful_head:
            _logger.warning(
                "the draft head is not used, because a guess takes longer than a token of the model"
            )
        runner = ModelRunner(
            decoder,
            cache,
            limits,
            self.config.max_num_tokens,
            self.options.mapping,
            capture,
            self._debug_tensors,
            draft_head,
        )
        if self.device.type == "cuda":
            runner.agree_on_recordings(self.options.min_over_ranks)
        return runner
