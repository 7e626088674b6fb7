from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from inflight.core.ports import EngineClient
from tests.openai_endpoint.serving import DEMO, demo_engine, fake_engine, served

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template in the style of Hermes, so that tool calls are parsed."""


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    return file


@pytest.fixture(scope="package")
def fake_url(template: Path) -> Iterator[str]:
    with fake_engine() as engine, served(engine, chat_template=template) as url:
        yield url


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT folder with an adapter that changes the demo model's text."""
    import peft
    import torch
    import transformers

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def demo(template: Path, adapter: Path) -> Iterator[tuple[EngineClient, str]]:
    """The demo model's client, and the URL of an application in front of it, with an adapter `shouting`."""
    with (
        demo_engine(lora_adapters=f"shouting={adapter}") as engine,
        served(engine, chat_template=template) as url,
    ):
        yield engine, url


@pytest.fixture(scope="package")
def client(fake_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fake_url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="package")
def demo_client(demo: tuple[EngineClient, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo[1]}/v1", api_key="none", max_retries=0) as made:
        yield made
