"""A typed answer in every mode that sends a JSON schema."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Shape(BaseModel):
    kind: Literal["circle", "square"]
    is_filled: bool


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON, instructor.Mode.MD_JSON):
    client = instructor.from_openai(OpenAI(base_url=f"{os.environ['URL']}/v1", api_key="none"), mode=mode)
    shape = client.create(
        model="demo",
        response_model=Shape,
        messages=[{"role": "user", "content": "Which shape?"}],
        max_retries=0,
    )
    assert shape.model_dump() == {"kind": "circle", "is_filled": True}, (mode, shape)
