"""A simple beam search for `Driver`: no sequence ends, the best candidates continue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inflight.core.request.beam_search import BeamCandidates
from inflight.core.schedule.batch import BeamGroup, BeamMove

if TYPE_CHECKING:
    from tests.engine.driver import Row


@dataclass
class Beam:
    """`tokens` includes the prompt; `blocks` is the beam's block table; `parent` is the beam that it continues."""

    tokens: list[int]
    blocks: list[int]
    score: float = 0.0
    log_prob: float = 0.0
    parent: int = 0


@dataclass(frozen=True)
class SearchStep:
    """A batch's inputs for a beam search."""

    group: BeamGroup | None
    moves: tuple[BeamMove, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    replaced_blocks: tuple[tuple[int, int, int], ...] = ()
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    generation_slots: tuple[int, ...] = ()


class Search:
    """A beam search: `row` is the sequence of its context; `slots` are the slots of its beams.

    With `copies_all` no beam keeps a block that it shared, and the copied blocks are free in the same batch.
    """

    def __init__(self, row: Row, slots: list[int], tokens_per_block: int, free_blocks: list[int]) -> None:
        self.row = row
        self.slots = slots
        self.is_ready = False  # whether the latest batch includes its beams
        self.copies_all = False
        self.beams: list[Beam] = []
        self.num_copies = 0
        self.answers: list[BeamCandidates] = []
        self._num_computed = 0
        self._tokens_per_block = tokens_per_block
        self._free_blocks = free_blocks

    @property
    def generated(self) -> list[list[int]]:
        """Every beam's tokens, best first."""
        return [beam.tokens[self.row.prompt_length :] for beam in self.beams]

    def prepare(self, context_length: int = 0) -> SearchStep:
        """Prepare the next batch: `context_length` tokens of the context or, after the context, the beams."""
        self.is_ready = bool(self.beams) or (
            context_length > 0 and self.row.num_computed + context_length == len(self.row.tokens)
        )
        count = 2 * len(self.slots)
        if not self.beams:
            group = BeamGroup((self.slots[0],), (0.0,), count) if self.is_ready else None
            return SearchStep(group)
        copies, replaced, new = self._blocks()
        self.num_copies += len(copies)
        return SearchStep(
            BeamGroup(tuple(self.slots), tuple(beam.score for beam in self.beams), count),
            tuple(
                BeamMove(slot, self.slots[beam.parent], beam.tokens[-1])
                for slot, beam in zip(self.slots, self.beams, strict=True)
            ),
            tuple(copies),
            tuple(replaced),
            tuple(new),
            tuple(self.slots),
        )

    def take(self, candidates: BeamCandidates) -> None:
        """Process the result of the batch that `prepare` was for."""
        self.answers.append(candidates)
        old = self.beams or [Beam(self.row.tokens, self.row.blocks)]
        self._num_computed = len(old[0].tokens)
        log_probs = candidates.log_probs or (0.0,) * len(candidates.rows)
        best = list(zip(candidates.rows, candidates.token_ids, candidates.scores, log_probs, strict=True))[
            : len(self.slots)
        ]
        self.beams = [
            Beam([*old[row].tokens, token], list(old[row].blocks), score, old[row].log_prob + log_prob, row)
            for row, token, score, log_prob in best
        ]
        held = {block for beam in self.beams for block in beam.blocks}
        freed = {block for beam in old for block in beam.blocks} - held
        self._free_blocks[:0] = sorted(freed)  # to be reused at once

    def _blocks(self) -> tuple[list, list, list]:
        """Give every beam a block of its own for its next token's keys: its last block or a new one."""
        copies, replaced, new = [], [], []
        index = self._num_computed // self._tokens_per_block
        written: set[int] = set()
        copied: set[int] = set()
        for slot, beam in zip(self.slots, self.beams, strict=True):
            if index == len(beam.blocks):
                beam.blocks.append(self._free_blocks.pop(0))
                new.append((slot, (beam.blocks[-1],)))
            elif beam.blocks[index] in written or self.copies_all:
                copied.add(beam.blocks[index])
                copies.append((beam.blocks[index], self._free_blocks.pop(0)))
                beam.blocks[index] = copies[-1][1]
                replaced.append((slot, index, beam.blocks[index]))
            written.add(beam.blocks[index])
        if self.copies_all:
            self._free_blocks[:0] = sorted(copied)
        return copies, replaced, new
