"""The table of the marks that models put around their reasoning, named like vLLM's parsers where it has one.

`reasoning.py` reads answers by these descriptions. Immutable; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around a model's reasoning. They are ASCII.

    Attributes:
        begin: Text that opens reasoning.
        end: Text that ends it.
        is_always: Whether an answer begins with reasoning even if neither it nor the prompt has `begin`.
        skipped: Texts of which one may stand before the answer, and is dropped.
        closing: Text that ends the answer, and is dropped; "": none.
        has_channels: Whether an answer is a sequence of messages with headers, which `channels.py` separates.
        models: The models that write these marks, for the documentation.
    """

    begin: str
    end: str
    is_always: bool = False
    skipped: tuple[str, ...] = ()
    closing: str = ""
    has_channels: bool = False
    models: str = ""


REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>", models="Qwen 3, GLM 4.5, SmolLM 3, MiniMax M2, Kimi K2"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_always=True, models="DeepSeek-R1, Step 3"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", models="Magistral, Ministral 3"),
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        has_channels=True,
        models="gpt-oss",
    ),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", models="Gemma 4"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", models="Seed-OSS"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:", models="Granite 3.2"),
    "command_a": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        skipped=("<|START_RESPONSE|>",),
        closing="<|END_RESPONSE|>",
        models="Command A Reasoning",
    ),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", models="Apertus"),
    "longcat": ReasoningFormat("<longcat_think>", "</longcat_think>", models="LongCat-Flash-Thinking"),
    "exaone_deep": ReasoningFormat("<thought>", "</thought>", models="EXAONE Deep"),
    "apriel": ReasoningFormat(
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        closing="[END FINAL RESPONSE]",
        models="Apriel Thinker 1.5",
    ),
    "reflection": ReasoningFormat("<thinking>", "</thinking>", models="Reflection"),
    "hunyuan_a13b": ReasoningFormat(
        "<think>", "</think>", skipped=("<answer>",), closing="</answer>", models="Hunyuan A13B"
    ),
    "ernie45": ReasoningFormat(
        "<think>", "</think>", skipped=("<response>",), closing="</response>", models="ERNIE 4.5 Thinking"
    ),
}
"""The formats by name. `auto` takes the first whose marks are in the template."""

REASONING_PARSERS = tuple(REASONING_FORMATS)
"""Names of the formats. think: reasoning begins with `<think>`, in the answer or in the prompt. deepseek_r1:
everything before `</think>` is reasoning, for models that leave `<think>` out."""


def find_reasoning_format(parser: str) -> ReasoningFormat:
    """Return the format with that name; raise InvalidArgument if it does not exist."""
    if parser not in REASONING_FORMATS:
        raise InvalidArgument(
            f"the reasoning parser is {parser!r}, expected one of {', '.join(REASONING_PARSERS)}"
        )
    return REASONING_FORMATS[parser]


def reasoning_format_in(template: str) -> str:
    """Return the name of the format whose marks a template's source has; "" for none."""
    if "</think>" in template:
        return "think"
    found = (
        name for name, form in REASONING_FORMATS.items() if form.begin in template and form.end in template
    )
    return next(found, "")
