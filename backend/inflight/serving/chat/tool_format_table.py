"""The table of the formats of tool calls, named like vLLM's parsers where it has one.

Immutable. Standard library only; any thread.
"""

from __future__ import annotations

from inflight.errors import InvalidArgument
from inflight.serving.chat.channels import CALL_BEGIN, CALL_END, CALL_NAME_END
from inflight.serving.chat.tool_formats import ArgumentStyle, ArgumentTags, Ids, ToolFormat

TOOL_FORMATS = {
    "llama3_json": ToolFormat(
        "<|python_tag|>",
        arguments_key="parameters",
        needs_marker=False,
        separator=";",
        models="Llama 3.1, 3.2, 3.3",
    ),
    "hermes": ToolFormat(
        "<tool_call>",
        end="</tool_call>",
        pads="\n",
        models="Qwen 2.5 and 3, Hermes, SmolLM 3, Granite 4, ERNIE 4.5",
    ),
    "mistral": ToolFormat(
        "[TOOL_CALLS]",
        is_list=True,
        separator=",",
        takes_names=True,
        ids=Ids.NINE,
        has_special_marker=True,
        models="Mistral, Ministral, Mistral Small",
    ),
    "json": ToolFormat(
        "",
        is_list=True,
        needs_marker=False,
        separator=",",
        models="xLAM, and models whose template asks for this form",
    ),
    "qwen3_coder": ToolFormat(
        "<tool_call>",
        ArgumentStyle.TAGS,
        "</tool_call>",
        call_begin="<function=",
        name_end=">",
        call_end="</function>",
        tags=ArgumentTags("<parameter=", ">", "</parameter>", pads=True),
        has_own_markers=True,
        pads="\n",
        models="Qwen3-Coder, Qwen 3.5, Step 3.5, Nemotron 3",
    ),
    "pythonic": ToolFormat(
        "", ArgumentStyle.PYTHON, is_list=True, needs_marker=False, separator=",", models="Llama 3.2, ToolACE"
    ),
    "llama4_pythonic": ToolFormat(
        "<|python_start|>",
        ArgumentStyle.PYTHON,
        "<|python_end|>",
        is_list=True,
        separator=",",
        has_special_marker=True,
        models="Llama 4",
    ),
    "deepseek_v3": ToolFormat(
        "<｜tool▁calls▁begin｜>",
        ArgumentStyle.JSON,
        "<｜tool▁calls▁end｜>",
        call_begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        name_end="\n```json\n",
        call_end="\n```<｜tool▁call▁end｜>",
        has_special_marker=True,
        models="DeepSeek V3, R1",
    ),
    "deepseek_v31": ToolFormat(
        "<｜tool▁calls▁begin｜>",
        ArgumentStyle.JSON,
        "<｜tool▁calls▁end｜>",
        call_begin="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
        has_special_marker=True,
        models="DeepSeek V3.1",
    ),
    "deepseek_v32": ToolFormat(
        "<｜DSML｜function_calls>",
        ArgumentStyle.TAGS,
        "</｜DSML｜function_calls>",
        call_begin='<｜DSML｜invoke name="',
        name_end='">',
        call_end="</｜DSML｜invoke>",
        tags=ArgumentTags(
            '<｜DSML｜parameter name="',
            '" string="false">',
            "</｜DSML｜parameter>",
            text_key_end='" string="true">',
        ),
        pads="\n",
        models="DeepSeek V3.2",
    ),
    "glm45": ToolFormat(
        "<tool_call>",
        ArgumentStyle.TAGS,
        "</tool_call>",
        tags=ArgumentTags("<arg_key>", "</arg_key>", "</arg_value>", value_begin="<arg_value>"),
        models="GLM 4.5 and later",
    ),
    "kimi_k2": ToolFormat(
        "<|tool_calls_section_begin|>",
        ArgumentStyle.JSON,
        "<|tool_calls_section_end|>",
        call_begin="<|tool_call_begin|>functions.",
        name_end="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        is_numbered=True,
        ids=Ids.NUMBERED,
        has_special_marker=True,
        models="Kimi K2",
    ),
    "minimax_m2": ToolFormat(
        "<minimax:tool_call>",
        ArgumentStyle.TAGS,
        "</minimax:tool_call>",
        call_begin='<invoke name="',
        name_end='">',
        call_end="</invoke>",
        tags=ArgumentTags('<parameter name="', '">', "</parameter>"),
        pads="\n",
        models="MiniMax M2",
    ),
    "granite": ToolFormat(
        "<|tool_call|>", is_list=True, separator=",", has_special_marker=True, models="Granite 3"
    ),
    "granite-20b-fc": ToolFormat("<function_call>", models="Granite 20B function calling"),
    "phi4_mini_json": ToolFormat("functools", is_list=True, separator=",", models="Phi-4-mini"),
    "gemma4": ToolFormat(
        "<|tool_call>",
        ArgumentStyle.BARE_KEYS,
        "<tool_call|>",
        call_begin="call:",
        has_own_markers=True,
        quote='<|"|>',
        models="Gemma 4",
    ),
    "functiongemma": ToolFormat(
        "<start_function_call>",
        ArgumentStyle.BARE_KEYS,
        "<end_function_call>",
        call_begin="call:",
        has_own_markers=True,
        quote="<escape>",
        models="FunctionGemma",
    ),
    "olmo3": ToolFormat(
        "<function_calls>",
        ArgumentStyle.PYTHON,
        "</function_calls>",
        separator="\n",
        pads="\n",
        models="OLMo 3",
    ),
    "lfm2": ToolFormat(
        "<|tool_call_start|>",
        ArgumentStyle.PYTHON,
        "<|tool_call_end|>",
        is_list=True,
        separator=",",
        has_special_marker=True,
        models="LFM2",
    ),
    "minimax": ToolFormat("<tool_calls>", end="</tool_calls>", separator="\n", models="MiniMax M1"),
    "jamba": ToolFormat(
        "<tool_calls>", end="</tool_calls>", is_list=True, separator=",", models="Jamba, Hunyuan A13B, Apriel"
    ),
    "smollm2": ToolFormat("<tool_call>", end="</tool_call>", is_list=True, separator=",", models="SmolLM 2"),
    "seed_oss": ToolFormat(
        "<seed:tool_call>",
        ArgumentStyle.TAGS,
        "</seed:tool_call>",
        call_begin="<function=",
        name_end=">",
        call_end="</function>",
        tags=ArgumentTags("<parameter=", ">", "</parameter>"),
        has_own_markers=True,
        pads="\n",
        models="Seed-OSS",
    ),
    "internlm": ToolFormat(
        "<|action_start|><|plugin|>",
        end="<|action_end|>",
        arguments_key="parameters",
        models="InternLM 2 and 2.5",
    ),
    "nemotron": ToolFormat(
        "<TOOLCALL>", end="</TOOLCALL>", is_list=True, separator=",", models="Nemotron Nano 2"
    ),
    "step3": ToolFormat(
        "<｜tool_calls_begin｜>",
        ArgumentStyle.TAGS,
        "<｜tool_calls_end｜>",
        call_begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        name_end='">',
        call_end="</steptml:invoke><｜tool_call_end｜>",
        tags=ArgumentTags('<steptml:parameter name="', '">', "</steptml:parameter>"),
        pads="\n",
        models="Step 3",
    ),
    "longcat": ToolFormat(
        "<longcat_tool_call>", end="</longcat_tool_call>", pads="\n", models="LongCat-Flash"
    ),
    "longcat_xml": ToolFormat(
        "<longcat_tool_call>",
        ArgumentStyle.TAGS,
        "</longcat_tool_call>",
        tags=ArgumentTags(
            "<longcat_arg_key>",
            "</longcat_arg_key>",
            "</longcat_arg_value>",
            value_begin="<longcat_arg_value>",
        ),
        models="later LongCat models",
    ),
    "functionary": ToolFormat(
        "<function=",
        ArgumentStyle.JSON,
        "</function>",
        name_end=">",
        models="Functionary 3.1, Llama 3.1 with custom functions",
    ),
    "openai": ToolFormat(
        CALL_BEGIN,
        ArgumentStyle.JSON,
        CALL_END,
        name_end=CALL_NAME_END,
        has_special_marker=True,
        reasoning_parser="openai_gptoss",
        models="gpt-oss",
    ),
    "command_a": ToolFormat(
        "<|START_ACTION|>",
        end="<|END_ACTION|>",
        name_key="tool_name",
        arguments_key="parameters",
        is_list=True,
        separator=",",
        has_special_marker=True,
        models="Command A",
    ),
}
"""The formats by name. `auto` takes the first that reads a template's calls best."""

TOOL_CALL_PARSERS = tuple(TOOL_FORMATS)
"""Names of the formats. `json` is for models without a format: the answer is a list of calls and nothing else."""


def find_tool_format(parser: str) -> ToolFormat:
    """Return the format with that name; raise InvalidArgument if it does not exist."""
    if parser not in TOOL_FORMATS:
        raise InvalidArgument(
            f"the tool call parser is {parser!r}, expected one of {', '.join(TOOL_CALL_PARSERS)}"
        )
    return TOOL_FORMATS[parser]
