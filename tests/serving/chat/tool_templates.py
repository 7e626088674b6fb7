"""How chat templates of model families write tool calls.

Not copied, and compared with the published templates of gpt-oss, Gemma 4, Kimi K2, MiniMax M1 and M2, Seed-OSS,
DeepSeek V3.1 and V3.2, GLM 4.6, Step 3.7, LFM 2.5, Nemotron Nano 2, Apriel 1.5, Hunyuan A13B, Command R7B, OLMo 3,
InternLM 2, Functionary 3.1 and xLAM. `c` is a call's function, `calls` are all of them, and `ids` are their ids.
"""

from __future__ import annotations

_OBJECT = "{'name': c.name, 'arguments': c.arguments} | tojson"
_EACH = "{% for c in calls %}"
_END = "{% endfor %}"
_COMMA = "{{ ', ' if not loop.last }}"
_LIST = f"[{_EACH}{{{{ {_OBJECT} }}}}{_COMMA}{_END}]"
_VALUE = "{{ v if v is string else v | tojson }}"
_KEYWORDS = (
    "{% for k, v in c.arguments.items() %}{{ k }}={{ v | python }}{{ ', ' if not loop.last }}{% endfor %}"
)


def _xml(begin: str, middle: str, end: str) -> str:
    return f"{{% for k, v in c.arguments.items() %}}{begin}{{{{ k }}}}{middle}{_VALUE}{end}\n{{% endfor %}}"


_QWEN = "<function={{ c.name }}>\n" + _xml("<parameter=", ">\n", "\n</parameter>") + "</function>\n"
_JSON = "{{ c.arguments | tojson }}"

TOOL_TEMPLATES = {
    "hermes": f"{_EACH}<tool_call>\n{{{{ {_OBJECT} }}}}\n</tool_call>\n{_END}",  # Qwen 3, ERNIE 4.5, SmolLM 3
    "llama3_json": f"{_EACH}{{{{ {{'name': c.name, 'parameters': c.arguments}} | tojson }}}}"
    "{{ '; ' if not loop.last }}" + _END,
    "mistral": f"[TOOL_CALLS]{_LIST}",
    "json": _LIST,  # xLAM
    "qwen3_coder": f"{_EACH}<tool_call>\n{_QWEN}</tool_call>\n{_END}",
    "pythonic": f"[{_EACH}{{{{ c.name }}}}({_KEYWORDS}){_COMMA}{_END}]",
    "llama4_pythonic": f"<|python_start|>[{_EACH}{{{{ c.name }}}}({_KEYWORDS}){_COMMA}{_END}]<|python_end|>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜>{_EACH}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{{{ c.name }}}}\n"
    f"```json\n{_JSON}\n```<｜tool▁call▁end｜>\n{_END}<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜>{_EACH}<｜tool▁call▁begin｜>{{{{ c.name }}}}<｜tool▁sep｜>{_JSON}"
    f"<｜tool▁call▁end｜>{_END}<｜tool▁calls▁end｜>",
    "deepseek_v32": f'<｜DSML｜function_calls>\n{_EACH}<｜DSML｜invoke name="{{{{ c.name }}}}">\n'
    + _xml(
        '<｜DSML｜parameter name="',
        "\" string=\"{{ 'true' if v is string else 'false' }}\">",
        "</｜DSML｜parameter>",
    )
    + f"</｜DSML｜invoke>\n{_END}</｜DSML｜function_calls>",
    "glm45": f"{_EACH}<tool_call>{{{{ c.name }}}}\n"
    + _xml("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
    + f"</tool_call>\n{_END}",
    "kimi_k2": f"<|tool_calls_section_begin|>{_EACH}<|tool_call_begin|>{{{{ ids[loop.index0] }}}}"
    f"<|tool_call_argument_begin|>{_JSON}<|tool_call_end|>{_END}<|tool_calls_section_end|>",
    "minimax_m2": f'<minimax:tool_call>\n{_EACH}<invoke name="{{{{ c.name }}}}">\n'
    + _xml('<parameter name="', '">', "</parameter>")
    + f"</invoke>\n{_END}</minimax:tool_call>",
    "granite": f"<|tool_call|>{_LIST}",
    "granite-20b-fc": f"{_EACH}<function_call> {{{{ {_OBJECT} }}}} {_END}",
    "phi4_mini_json": f"functools{_LIST}",
    "gemma4": f"{_EACH}<|tool_call>call:{{{{ c.name }}}}{{{{ c.arguments | bare('<|\"|>') }}}}<tool_call|>{_END}",
    "functiongemma": f"{_EACH}<start_function_call>call:{{{{ c.name }}}}{{{{ c.arguments | bare('<escape>') }}}}"
    f"<end_function_call>{_END}",
    "olmo3": f"<function_calls>\n{_EACH}{{{{ c.name }}}}({_KEYWORDS})\n{_END}</function_calls>",
    "lfm2": f"<|tool_call_start|>[{_EACH}{{{{ c.name }}}}({_KEYWORDS}){_COMMA}{_END}]<|tool_call_end|>",
    "jamba": f"<tool_calls>{_LIST}</tool_calls>",  # Jamba, Hunyuan, Apriel
    "smollm2": f"<tool_call>{_LIST}</tool_call>",
    "minimax": f"<tool_calls>\n{_EACH}{{{{ {_OBJECT} }}}}\n{_END}</tool_calls>",
    "seed_oss": f"{_EACH}<seed:tool_call>\n<function={{{{ c.name }}}}>\n"
    + _xml("<parameter=", ">", "</parameter>")
    + f"</function>\n</seed:tool_call>\n{_END}",
    "internlm": f"{_EACH}<|action_start|><|plugin|>\n"
    f"{{{{ {{'name': c.name, 'parameters': c.arguments}} | tojson }}}}"
    f"<|action_end|>\n{_END}",
    "nemotron": f"<TOOLCALL>{_LIST}</TOOLCALL>",
    "step3": f"<｜tool_calls_begin｜>\n{_EACH}<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="{{ c.name }}">\n'
    + _xml('<steptml:parameter name="', '">', "</steptml:parameter>")
    + f"</steptml:invoke><｜tool_call_end｜>\n{_END}<｜tool_calls_end｜>",
    "longcat": f"{_EACH}<longcat_tool_call>\n{{{{ {_OBJECT} }}}}\n</longcat_tool_call>\n{_END}",
    "longcat_xml": f"{_EACH}<longcat_tool_call>{{{{ c.name }}}}\n"
    + _xml("<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>")
    + f"</longcat_tool_call>\n{_END}",
    "functionary": f"{_EACH}<function={{{{ c.name }}}}>{_JSON}</function>{_END}",
    "openai": f"{_EACH}<|start|>assistant to=functions.{{{{ c.name }}}}<|channel|>commentary "
    f"json<|message|>{_JSON}<|call|>{_END}",
    "command_a": f"<|START_ACTION|>[{_EACH}\n    {{{{ {{'tool_call_id': '0', 'tool_name': c.name, "
    f"'parameters': c.arguments}} | tojson }}}}{_COMMA}{_END}\n]<|END_ACTION|>",
}
"""By the format's name."""
