"""The programs in docs/chat.md run against the fake engine, and the page describes the template correctly."""

from __future__ import annotations

import os
import re
from pathlib import Path

from inflight.serving.chat.reasoning_formats import REASONING_FORMATS
from inflight.serving.chat.template import ChatTemplate
from inflight.serving.chat.template_files import TemplateFiles
from inflight.serving.chat.tool_format_table import TOOL_FORMATS
from tests.openai_endpoint.serving import fake_engine, served
from tests.serving.chat.answers import write_calls
from tests.serving.chat.template_folders import source

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "chat.md").read_text(encoding="utf-8")
TEMPLATE = ROOT / "examples" / "chat_template.jinja"


def test_the_pages_programs_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    with fake_engine() as engine, served(engine, chat_template=TEMPLATE) as url:
        names: dict[str, object] = {}
        for block in blocks:
            exec(block.replace("http://localhost:9000", url), names)


def test_the_pages_template_is_chatml_without_tools() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b\n"}]
    texts = {
        ChatTemplate(TemplateFiles({"default": each}, {}, "page")).render(messages)
        for each in (TEMPLATE.read_text(encoding="utf-8"), source("chatml"))
    }
    assert len(texts) == 1


def test_the_page_has_the_table_of_formats() -> None:
    rows = ["| parser | two calls | models |", "| --- | --- | --- |"]
    for name, form in TOOL_FORMATS.items():
        text = " ".join(write_calls(name, [("f", {"a": 1}), ("g", {"b": "x"})]).split())
        mark = "````" if "`" in text else "`"
        rows.append(f"| `{name}` | {mark}{text.replace('|', chr(92) + '|')}{mark} | {form.models} |")
    begin, end = PAGE.index("| parser |"), PAGE.index("\n\n- **A call is streamed**")
    page = PAGE[:begin] + "\n".join(rows) + PAGE[end:]
    if os.environ.get("UPDATE_TABLES"):
        (ROOT / "docs" / "chat.md").write_text(page, encoding="utf-8")
    else:
        assert page == PAGE, "UPDATE_TABLES=1 writes it"


def test_the_page_has_the_table_of_reasoning_formats() -> None:
    for name, form in REASONING_FORMATS.items():
        begin, end = (each.replace("|", "\\|") for each in (form.begin, form.end))
        assert f"| `{name}` | `{begin}` | `{end}` | {form.models} |" in PAGE
