"""The jinja2 environment of chat templates, equal to transformers' environment, and rendering within limits.

Defines the functions that a template can call, and the limits of time and length. Templates come from the
operator, values from clients: values are plain JSON and are never compiled. Any thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from inflight.errors import InvalidArgument, Name, TooLong

MAX_CHARACTERS = 32 * 2**20
"""Largest number of characters of a rendered chat."""

MAX_SECONDS = 10.0
"""Largest processor time to render one chat, in seconds."""


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template; raise jinja2.TemplateSyntaxError if it is invalid."""
    return _environment().from_string(source)


def names_in(source: str) -> frozenset[str]:
    """Return the variables that a template reads from its caller, such as `tools`, but not those that it sets."""
    environment = _environment()
    tree = environment.parse(source)
    # jinja2 counts a variable as declared even if the template sets it only when the caller does not.
    asked = {
        test.node.name
        for test in tree.find_all(nodes.Test)
        if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
    }
    functions = cast(dict[str, Any], environment.globals)  # pyright: ignore[reportUnknownMemberType]
    return frozenset(meta.find_undeclared_variables(tree) | asked) - functions.keys()


def constants_in(source: str) -> frozenset[str]:
    """Return the texts in a template's expressions, such as names of roles."""
    values = (each.value for each in _environment().parse(source).find_all(nodes.Const))
    return frozenset(value for value in values if isinstance(value, str))


def render_bounded(template: jinja2.Template, values: Mapping[str, Any]) -> str:
    """Render a template with plain values, within MAX_CHARACTERS and MAX_SECONDS.

    Raises:
        InvalidArgument: The text is too long, or rendering takes too long.
        jinja2.TemplateError: The template refuses the values. Functions that it calls may raise other errors.
    """
    deadline = time.thread_time() + MAX_SECONDS
    pieces: list[str] = []
    size = 0
    for piece in template.generate(**values):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise TooLong(
                Name("messages"),
                f" make a prompt of more than {MAX_CHARACTERS} characters by the chat template",
            )
        if time.thread_time() > deadline:
            raise InvalidArgument(
                f"the chat template needs more than {MAX_SECONDS:g} s for ", Name("messages")
            )
    return "".join(pieces)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    filters = cast(dict[str, Any], environment.filters)  # pyright: ignore[reportUnknownMemberType]
    filters["tojson"] = _tojson
    functions = cast(dict[str, Any], environment.globals)  # pyright: ignore[reportUnknownMemberType]
    functions["raise_exception"] = _raise_exception
    functions["strftime_now"] = _strftime_now
    functions["dict"] = _Dict()
    functions["namespace"] = _Namespace
    return environment


class _GenerationTag(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks text for training. Its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the statements between the two tags, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Any) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as json.dumps writes it, because jinja2's own filter `tojson` escapes characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Dict:
    """`dict` for templates: creates dictionaries, but has no attributes that templates could exploit."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        """Return a dictionary with the given keys, all with one value, like `dict.fromkeys`."""
        return dict.fromkeys(*values)


class _Namespace(Namespace):
    """`namespace` for templates, without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportSelfClsParameterName]
        values = dict(*args[1:], **kwargs)  # a namespace may have an attribute named self
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}: it begins with _")
