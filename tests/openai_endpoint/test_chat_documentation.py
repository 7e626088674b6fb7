"""The programs in docs/chat.md run against the fake engine, and the page describes the template correctly."""

from __future__ import annotations

import re
from pathlib import Path

from inflight.serving.chat.template import ChatTemplate
from inflight.serving.chat.template_files import TemplateFiles
from inflight.serving.chat.tool_styles import TOOL_CALL_PARSERS
from tests.openai_endpoint.serving import fake_engine, served
from tests.serving.chat.template_folders import TEMPLATES, source

PAGE = (Path(__file__).parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")


def test_the_pages_programs_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    with fake_engine() as engine, served(engine, chat_template=TEMPLATES / "qwen3.jinja") as url:
        names: dict[str, object] = {}
        for block in blocks:
            exec(block.replace("http://localhost:9000", url), names)


def test_the_template_is_chatml() -> None:
    found = re.search(r"<<'END'\n(.*?)END\n", PAGE, re.DOTALL)
    assert found is not None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b\n"}]
    texts = {
        ChatTemplate(TemplateFiles({"default": each}, {}, "page")).render(messages)
        for each in (found[1], source("chatml"))
    }
    assert len(texts) == 1


def test_every_parser_is_on_the_page() -> None:
    assert set(TOOL_CALL_PARSERS) <= set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE))
