"""Drafting and verification by the client gives the ensemble's text."""

from __future__ import annotations

import pytest

from . import text_client
from .speculative_client import Coordinator

PROMPTS = ["import os\n Write a function.", "class Reader:\n    def close(self):\n"]
LENGTH = 22


@pytest.mark.parametrize("return_logits", ["", "draft", "target"], ids=lambda role: role or "no logits")
def test_text_of_client_side_drafting_equals_the_ensembles(unary_server, return_logits):
    control = text_client.Flags(output_len=LENGTH, embedding_bias_words=(), embedding_bias_weights=())
    for number, prompt in enumerate(PROMPTS):
        coordinator = Coordinator(unary_server, return_logits=return_logits)
        text = coordinator.run(prompt, LENGTH, num_draft_tokens=5, request_id=str(number + 1))
        assert [text] == text_client.run(unary_server, [prompt], control).texts
        assert max(coordinator.num_verified) == 6, "all five drafts and one more"
