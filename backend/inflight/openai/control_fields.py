"""Fields of bodies that are sampling controls.

Written by scripts/write_configs from inflight/core/request/sampling_config.py: change that.
"""

from __future__ import annotations

from pydantic import BaseModel, Field


class BodyControls(BaseModel):
    """The numbers among the sampling controls."""

    temperature: float = Field(1.0, ge=0)
    top_n_sigma: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=-1, le=2147483647)
    top_p: float = Field(1.0, ge=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    presence_penalty: float = Field(0.0)
    frequency_penalty: float = Field(0.0)
    min_tokens: int = Field(0, ge=0, le=2147483647)
    no_repeat_ngram_size: int = Field(0, ge=0, le=2147483647)
    length_penalty: float = Field(1.0, ge=0)
