"""Chat templates of many models: rendered like transformers renders them, or refused like it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from inflight.errors import ConfigError, InvalidArgument
from inflight.serving.chat.messages import MessageForm, picture_urls
from inflight.serving.chat.template import ChatTemplate, load_chat_template
from inflight.serving.chat.template_environment import compile_template, names_in, render_bounded
from inflight.serving.chat.template_files import TemplateFiles
from inflight.serving.chat.template_trial import RoleTreatment, Trial, find_treatment
from tests.serving.chat.conversations import CONVERSATIONS, SYSTEM, TOOLS, USER, Messages, as_sent, in_parts
from tests.serving.chat.template_folders import NAMES, make_folder, reference, source

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
WITHOUT_TOOLS = {
    "chatml", "deepseek_r1", "deepseek_v2", "gemma2", "gemma3", "llama2", "llama3", "mistral_small",
    "mistral_v1", "olmo", "parts_only", "phi3", "qwen2_vl", "qwen3_thinking", "vicuna", "zephyr",
}  # fmt: skip


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(TemplateFiles({"default": source(name)}, SPECIAL, name))


def of_source(text: str) -> ChatTemplate:
    return ChatTemplate(TemplateFiles({"default": text}, SPECIAL, "a test"))


@pytest.fixture(scope="module")
def transformers_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return reference(make_folder(tmp_path_factory.mktemp("checkpoint")))


def expected(tokenizer: Any, name: str, messages: Messages, **options: Any) -> str | None:
    """Return the rendering by transformers; None if the template refuses."""
    chat = as_sent(messages) if name == "deepseek_r1" else messages  # its template needs arguments as text
    if name == "parts_only":
        chat = in_parts(chat)
    try:
        return tokenizer.apply_chat_template(chat, chat_template=source(name), tokenize=False, **options)
    except Exception:
        return None


def rendered(name: str, messages: Messages, **options: Any) -> str | None:
    try:
        return template(name).render(as_sent(messages), **options)
    except InvalidArgument:
        return None


def with_empty(messages: Messages) -> Messages:
    return [{**each, "content": ""} if each.get("content") is None else each for each in messages]


def lost(text: str, messages: Messages) -> bool:
    """Return whether a rendered chat lacks a tool's result."""
    return any(each["role"] == "tool" and each["content"] not in text for each in messages)


@pytest.mark.parametrize("name", NAMES)
def test_chats_are_rendered_as_by_transformers(
    transformers_tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    num_rendered = 0
    for label, messages in CONVERSATIONS.items():
        for tools in (None, TOOLS) if name not in WITHOUT_TOOLS else (None,):
            for options in (
                {"add_generation_prompt": True},
                {"add_generation_prompt": False},
                {"add_generation_prompt": False, "continue_final_message": True},
            ):
                wanted = expected(transformers_tokenizer, name, messages, tools=tools, **options)
                if label == "another role" and (wanted is None or "Be kind." not in wanted):
                    # A template that does not know the role developer gets system messages.
                    messages = [{**message, "role": "system"} for message in messages[:1]] + messages[1:]
                    wanted = expected(transformers_tokenizer, name, messages, tools=tools, **options)
                    messages = CONVERSATIONS[label]
                if wanted is None:  # content null is replaced by "" for templates that cannot render it
                    wanted = expected(
                        transformers_tokenizer, name, with_empty(messages), tools=tools, **options
                    )
                if wanted is not None and lost(wanted, messages):
                    wanted = None  # transformers silently leaves it out
                assert rendered(name, messages, tools=tools, **options) == wanted, (label, tools, options)
                num_rendered += wanted is not None
    assert num_rendered >= 18


def test_the_templates_cover_every_style() -> None:
    assert len(NAMES) >= 20
    styles = {template(name).style for name in NAMES}
    assert styles == {"", "hermes", "llama3_json", "mistral", "deepseek_v3", "openai"}
    assert template("qwen3").style == template("qwen2").style == template("smollm").style == "hermes"
    assert template("mistral_v3").style == template("mistral_nemo").style == "mistral"
    assert template("llama31").style == "llama3_json"
    thinking = {name for name in NAMES if template(name).reasoning_style == "think"}
    assert thinking == {"deepseek_r1", "qwen3", "qwen3_thinking", "smollm"}


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("smollm", {"enable_thinking": False}),
        ("llama31", {"date_string": "1 Jan 2030"}),
        ("granite", {"controls": {"length": "short"}}),
        ("granite", {"documents": [{"title": "A", "text": "one"}, {"title": "B", "text": "two"}]}),
        ("gpt_oss", {"reasoning_effort": "high"}),
    ],
)
def test_extra_variables_are_rendered(
    transformers_tokenizer: PreTrainedTokenizerBase, name: str, variables: Mapping[str, Any]
) -> None:
    messages = [SYSTEM, USER]
    wanted = expected(transformers_tokenizer, name, messages, add_generation_prompt=True, **variables)
    assert wanted is not None
    assert rendered(name, messages, template_kwargs=variables) == wanted
    assert rendered(name, messages) != wanted


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("chatml", {"enable_thinking": True}, r"chat_template_kwargs.enable_thinking.*no variable"),
        ("chatml", {"message": {}}, r"chat_template_kwargs.message: .* it has no others"),
        ("qwen3", {"content": "x"}, r"chat_template_kwargs.content: .* it has enable_thinking"),
        ("chatml", {"documents": []}, r"chat_template_kwargs.documents"),
        ("chatml", {"messages": []}, r"chat_template_kwargs.messages is not allowed"),
        ("qwen3", {"enable_thinking": object()}, r"object in it"),
    ],
)
def test_unknown_variables_are_refused(name: str, variables: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        template(name).render([USER], template_kwargs=variables)


def test_tools_are_refused_by_a_template_without_tools() -> None:
    for name in NAMES:
        if name in WITHOUT_TOOLS:
            with pytest.raises(InvalidArgument, match="no place for tools"):
                template(name).render([USER], tools=TOOLS)
            assert template(name).render([USER], tools=[]) == template(name).render([USER])


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_message_are_rendered_by_the_template_or_joined(
    transformers_tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    parts = [{"type": "text", "text": "Two"}, {"type": "text", "text": "parts."}]
    text = template(name).render([{"role": "user", "content": parts}])
    joined = template(name).render([{"role": "user", "content": "Two\nparts."}])
    if name in ("gemma3", "mistral_small", "parts_only", "qwen2_vl"):
        assert "Twoparts." in text
        chat: Any = [{"role": "user", "content": parts}]
        assert text == transformers_tokenizer.apply_chat_template(
            chat, chat_template=source(name), tokenize=False, add_generation_prompt=True
        )
    else:
        assert text == joined


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_pictures_are_rendered_as_by_transformers(transformers_tokenizer: PreTrainedTokenizerBase) -> None:
    content = [PICTURE, {"type": "text", "text": "What is this?"}, PICTURE]
    plain = [{"type": "image"}, {"type": "text", "text": "What is this?"}, {"type": "image"}]
    taking = {name for name in NAMES if template(name).takes_pictures}
    assert taking == {"gemma3", "mistral_small", "parts_only", "qwen2_vl"}
    for name in NAMES:
        messages: Messages = [{"role": "user", "content": content}]
        if name not in taking:
            with pytest.raises(InvalidArgument, match=r"content\[0\] is of type 'image_url'.*text alone"):
                template(name).render(messages, takes_pictures=True)
            continue
        text = template(name).render(messages, takes_pictures=True)
        chat: Any = [{"role": "user", "content": plain}]
        assert text == transformers_tokenizer.apply_chat_template(
            chat, chat_template=source(name), tokenize=False, add_generation_prompt=True
        )
        assert "What is this?" in text and "base64" not in text
        assert [(each.name, each.url) for each in picture_urls(messages)] == [
            (f"messages[0].content[{place}].image_url.url", "data:image/png;base64,AAAA") for place in (0, 2)
        ]
        with pytest.raises(InvalidArgument, match="text alone"):
            template(name).render(messages)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages is empty"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([{"content": "x"}], r"messages\[0\].role is missing, expected a text such as user"),
        ([USER, {"role": "user"}], r"messages\[1\].content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is 5,"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"content\[0\].*image_url"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}],
            r"messages\[0\].content\[1\] is of type 'input_audio'; this server takes parts of type text alone",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text"),
        ([{"role": "user", "content": ["x", 5]}], r"content\[1\] is 5,"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], r"tool_calls\[0\]"),
        ([{"role": "assistant", "tool_calls": {}}], r"tool_calls is \{\},"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"tool_calls\[0\].function.arguments is not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            r"arguments is '\[1\]', expected a JSON object",
        ),
        ([{"role": "user", "content": "x", "extra": print}], r"messages\[0\] has a builtin_function"),
        ([{"role": "assistant", "content": "x", "reasoning_content": 5}], r"reasoning_content is 5,"),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        template("qwen3").render(messages)


def test_a_templates_own_error_is_reported() -> None:
    with pytest.raises(InvalidArgument, match="rendered by the chat template: A system role is not known"):
        template("gemma2").render([SYSTEM, USER])


def test_impossible_continuations_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"continue_final_message and add_generation_prompt"):
        template("chatml").render([USER], continue_final_message=True)
    with pytest.raises(InvalidArgument, match="the last message has no content"):
        template("qwen3").render(
            as_sent(CONVERSATIONS["tool result"][:2]),
            add_generation_prompt=False,
            continue_final_message=True,
        )
    with pytest.raises(InvalidArgument, match="changes the last message"):
        of_source("{% for m in messages %}{{ m.content[:8] }}{% endfor %}").render(
            [USER, {"role": "assistant", "content": "more than that"}],
            add_generation_prompt=False,
            continue_final_message=True,
        )


@pytest.mark.parametrize(
    "reads",
    [
        "{{ m.content[:3] }}{{ m.content }}",  # like Qwen 3's first template looks at every message
        "{{ m['content'] + '!' }}",
        "{% if 'x' in m.content %}{% endif %}{{ m.content | trim }}",
        "{{ m.content | tojson }}",
        "{% if m.content == '' %}{{ raise_exception('empty') }}{% else %}{{ m.content or '' }}{% endif %}",
        "{{ m.content if m.content is defined else raise_exception('missing') }}",
        "{% if 'content' in m %}{{ m.content or raise_exception('empty') }}{% endif %}",
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_a_call_without_content_is_rendered(reads: str, as_text: bool) -> None:
    """Empty content has the form that the template can render."""
    arguments = "{{ '' + call.function.arguments }}" if as_text else "{{ call.function.arguments.city }}"
    calls = f"{{% for call in m.tool_calls or [] %}}{{{{ call.function.name }}}}{arguments}{{% endfor %}}"
    chat = of_source(f"{{% for m in messages %}}<{{{{ m.role }}}}>{reads}{calls}{{% endfor %}}")
    call = as_sent([CONVERSATIONS["tool result"][1]])[0]
    for null in ({}, {"content": None}):
        sent = {**{name: value for name, value in call.items() if name != "content"}, **null}
        text = chat.render([USER, sent, {"role": "tool", "content": "21"}, USER])
        assert "weather" in text and "Zürich" in text and "None" not in text
        assert text == chat.render([USER, {**call, "content": None}, {"role": "tool", "content": "21"}, USER])


@pytest.mark.parametrize("role", ["wizard", ""])
def test_an_unknown_role_is_refused(role: str) -> None:
    for name in NAMES:
        with pytest.raises(
            InvalidArgument, match=rf"messages\[1\].role is '{role}'|messages cannot be rendered"
        ):
            template(name).render([USER, {"role": role, "content": "SECRET RULE"}, USER])


def test_a_message_that_a_template_leaves_out_is_refused() -> None:
    two = of_source(
        "{% for m in messages %}{% if m.role in ('user', 'npc') %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert two.render([USER, {"role": "npc", "content": "a role of its own"}]).endswith("a role of its own")
    for role in ("system", "developer", "assistant", "tool"):
        with pytest.raises(InvalidArgument, match=rf"messages\[1\].role is '{role}'.*expected user$"):
            two.render([USER, {"role": role, "content": "x"}])


def test_a_templates_support_of_a_role_is_determined_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def counted(trial: Trial, form: MessageForm, role: str) -> RoleTreatment:
        asked.append(role)
        return find_treatment(trial, form, role)

    chat = of_source(
        "{% for m in messages %}{% if m.role in ('user', 'npc') %}{{ m.content }}{% endif %}{% endfor %}"
        "{% set unused = 'lost' %}"
    )
    monkeypatch.setattr("inflight.serving.chat.template.find_treatment", counted)
    for _ in range(2):
        assert chat.render([USER, *[{"role": "npc", "content": "a"}] * 9]).endswith("a" * 9)
        for lost in ("lost", "wizard"):
            with pytest.raises(InvalidArgument, match=rf"messages\[1\].role is '{lost}'"):
                chat.render([USER, {"role": lost, "content": "x"}])
    assert asked == ["npc", "lost"]


CALL_WRITTEN = "{% for call in m.tool_calls or [] %}CALL{% endfor %}"
TOOL_CHAT = (
    "{% if tools %}{{ 'parameters <tool_call> arguments [TOOL_CALLS] <|start_header_id|>' }}"
    "{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}" + CALL_WRITTEN + "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\nTHINK{% endif %}"
)
OBJECT = "{{ {'name': call.function.name, 'KEY': call.function.arguments} | tojson }}"


@pytest.mark.parametrize("thinks", ["", "<think>\n"])
@pytest.mark.parametrize(
    ("call", "style"),
    [
        (f"<tool_call>{OBJECT}</tool_call>", "hermes"),
        (f"[TOOL_CALLS] [{OBJECT}]", "mistral"),
        ("[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}", "mistral"),
        (OBJECT.replace("KEY", "parameters"), "llama3_json"),
        (f"<|python_tag|>{OBJECT.replace('KEY', 'parameters')}", "llama3_json"),
        (f"[{OBJECT}]", "json"),  # xLAM's form
        ("<function={{ call.function.name }}>{{ call.function.arguments | tojson }}</function>", "functionary"),
        (f"<tool_calls>[{OBJECT}]</tool_calls>", "jamba"),
        (f"<tool_calls>\n{OBJECT}\n</tool_calls>", "minimax"),
        # These leave out arguments, or have a form that is not in the table.
        ("<minimax:tool_call><invoke name=\"{{ call.function.name }}\"></invoke></minimax:tool_call>", ""),
        ("[{{ call.function.name }}(city='{{ call.function.arguments.pr0be_key }}')]", ""),
        ("<tool_call>\n<function={{ call.function.name }}>\n</function>\n</tool_call>", ""),
        ("<tool_call>{{ call.function.name }}\n<arg_key>x</arg_key></tool_call>", ""),
        (f"<|tool_call|>[{OBJECT}]", "granite"),
        (f"<calls>[{OBJECT}]</calls>", ""),
    ],
)  # fmt: skip
def test_the_call_style_is_detected_by_rendering_a_call(thinks: str, call: str, style: str) -> None:
    """Words of other styles in the template do not matter."""
    source_text = TOOL_CHAT.replace("CALL{%", call.replace("KEY", "arguments") + "{%").replace(
        "THINK", thinks
    )
    chat = of_source(source_text)
    assert chat.style == style
    assert chat.call_example and (style or repr(chat.call_example) in chat.unknown_calls())


@pytest.mark.parametrize(
    ("said", "style"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ("between <tool_call> and </tool_call>, with arguments", ""),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ("<|start_header_id|> parameters", ""),
    ],
)
def test_the_call_style_is_detected_from_instructions(said: str, style: str) -> None:
    chat = of_source(
        "{% if tools %}{{ SAID }}{% endif %}{{ messages[0].content }}".replace("SAID", repr(said))
    )
    assert (chat.style, chat.call_example) == (style, "")
    assert "does not show how the model writes tool calls" in chat.unknown_calls()


@pytest.mark.parametrize("name", ["xml_tools", "python_tools"])
def test_tools_are_passed_under_the_templates_name(name: str) -> None:
    """SmolLM3's template reads the first two names, and in later versions all three."""
    shown = "{% for tool in (NAME or [])[:] %}{{ tool | string }}{% endfor %}{{ messages[0].content }}"
    chat = of_source(shown.replace("NAME", name))
    assert chat.takes_tools and "'weather'" in chat.render([USER], tools=TOOLS)
    assert chat.render([USER]) == USER["content"]
    assert "mine" in chat.render([USER], template_kwargs={name: ["mine"]})
    with pytest.raises(InvalidArgument, match=f"chat_template_kwargs.{name} is where"):
        chat.render([USER], tools=TOOLS, template_kwargs={name: ["mine"]})
    newer = of_source(
        "{% if tools %}{% set xml_tools = tools %}{% endif %}{{ xml_tools }}{{ messages[0].content }}"
    )
    assert "'weather'" in newer.render([USER], tools=TOOLS)


TEXT = "{{ bos_token }}TEXT{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL = "TOOL{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
TWO = [{"name": "default", "template": TEXT}, {"name": "tool_use", "template": TOOL}]


@pytest.mark.parametrize(
    "files",
    [
        {"settings": {"chat_template": TEXT}},
        {"settings": {"chat_template": TWO}},
        {"settings": {"chat_template": TEXT}, "chat_template_DOT_jinja": TOOL},
        {"chat_template_DOT_jinja": TEXT, "additional_chat_templates__tool_use_DOT_jinja": TOOL},
        {"chat_template_DOT_jinja": TEXT, "additional_chat_templates__rag_DOT_jinja": TOOL},
        {
            "settings": {"chat_template": TEXT, "bos_token": {"content": "<s>", "__type": "AddedToken"}},
        },
        {
            "settings": {"chat_template": TEXT, "bos_token": None},
            "special_tokens_map_DOT_json": json.dumps({"bos_token": {"content": "<s>", "lstrip": False}}),
        },
        {"settings": {"chat_template": [TWO[1]]}},
        {"additional_chat_templates__tool_use_DOT_jinja": TOOL},
    ],
)
def test_templates_are_found_where_transformers_finds_them(tmp_path: Path, files: dict[str, Any]) -> None:
    folder = make_folder(tmp_path, **files)
    theirs: Any = reference(folder)
    chat = load_chat_template(str(folder))
    assert chat is not None
    for tools in (None, TOOLS):
        try:
            wanted = theirs.apply_chat_template([USER], tools=tools, tokenize=False)
        except ValueError:  # there is no default
            with pytest.raises(InvalidArgument, match="named default"):
                chat.render([USER], tools=tools, add_generation_prompt=False)
            continue
        if tools and "TEXT" in wanted:
            continue  # these tools would be ignored
        assert chat.render([USER], tools=tools, add_generation_prompt=False) == wanted


def test_the_template_of_a_multimodal_model_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    """transformers reads chat_template.json for the model's processor; tokenizer_config.json comes first here."""
    own = {"chat_template_DOT_json": json.dumps({"chat_template": TOOL})}
    chat = load_chat_template(str(make_folder(tmp_path / "alone", **own)))
    assert chat is not None and chat.render([USER], tools=TOOLS).startswith("TOOL")
    chat = load_chat_template(str(make_folder(tmp_path / "beside", settings={"chat_template": TEXT}, **own)))
    assert chat is not None and chat.render([USER]).startswith("<s>TEXT")


def test_a_template_file_overrides_the_checkpoints(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "checkpoint", settings={"chat_template": TEXT})
    (tmp_path / "own.jinja").write_text("OWN{{ messages[0].content }}")
    chat = load_chat_template(str(folder), tmp_path / "own.jinja")
    assert chat is not None
    assert chat.render([{"role": "user", "content": "x"}]) == "OWNx"


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert load_chat_template(str(make_folder(tmp_path))) is None


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = str(make_folder(tmp_path, settings={"chat_template": "a\n{% if %}"}))
    with pytest.raises(ConfigError, match=r"template default of .* is not a template, line 2"):
        load_chat_template(folder)
    with pytest.raises(ConfigError, match=r"missing.jinja cannot be read"):
        load_chat_template(folder, tmp_path / "missing.jinja")
    folder = str(make_folder(tmp_path / "other", settings={"chat_template": [5]}))
    with pytest.raises(ConfigError, match=r"chat_template of .* must be a text, or a list"):
        load_chat_template(folder)


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ ().__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__class__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% for x in range(10000000) %}{% endfor %}",
        "{{ messages | attr('__class__') }}{{ ('%s' | attr('format'))('x').__class__ }}",
    ],
)
def test_a_template_stays_in_its_sandbox(text: str) -> None:
    try:
        shown = render_bounded(compile_template(text), {"messages": [USER]})
    except Exception as error:
        assert type(error).__name__ in ("SecurityError", "OverflowError", "UndefinedError"), error
    else:
        assert "class" not in shown


def test_rendering_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = (
        "{% for i in range(1000) %}{% for j in messages %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    )
    chat = ChatTemplate(TemplateFiles({"default": loop}, SPECIAL, "loop"))
    with pytest.raises(InvalidArgument, match="more than 33554432 characters"):
        chat.render([{"role": "user", "content": "x" * 1_000_000}])
    monkeypatch.setattr("inflight.serving.chat.template_environment.MAX_SECONDS", 0.02)
    with pytest.raises(InvalidArgument, match=r"more than 0.02 s"):
        chat.render([{"role": "user", "content": "x"}] * 1000)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        ["role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "thinking"]
    ),
    JSON,
)
ODD_MESSAGES = st.lists(
    JSON | FIELDS | st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])},
                                          optional={"content": JSON | st.text(), "tool_calls": JSON}),
    max_size=4,
)  # fmt: skip


@given(st.sampled_from(NAMES), ODD_MESSAGES, st.booleans())
@settings(max_examples=100, deadline=None)
def test_odd_messages_raise_nothing_but_invalid_argument(name: str, messages: Any, continued: bool) -> None:
    try:
        text = template(name).render(
            messages, add_generation_prompt=not continued, continue_final_message=continued
        )
    except InvalidArgument:
        return
    assert isinstance(text, str)


@given(st.text(alphabet=st.sampled_from("{}%#-_ab'\"\\<|>[]/ \n"), max_size=30))
@settings(max_examples=100, deadline=None)
def test_nothing_in_a_message_is_compiled(content: str) -> None:
    text = template("chatml").render([{"role": "user", "content": content}])
    assert text == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{% set x = x | default(true) %}{{ x }}", {"x"}),
        ("{% if x is not defined %}{% set x = 1 %}{% endif %}{{ x }}", {"x"}),
        ("{% macro f(a) %}{{ a }}{{ tools }}{% endmacro %}{{ f(namespace()) }}", {"tools"}),
        ("{% for m in messages %}{% set y = m %}{{ y }}{{ loop.index }}{% endfor %}", {"messages"}),
    ],
)
def test_the_variables_that_a_template_reads_are_found(text: str, names: set[str]) -> None:
    assert names_in(text) == names
