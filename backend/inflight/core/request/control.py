"""A sampling control: all that is known of it beside its type and its neutral value, for every protocol. Pure.

`sampling_config` declares the controls with these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a control may have, or if it has several, each of them may be.

    Attributes:
        text: For errors: "in [0, 1]".
        contains: Whether a value is one of them; a NaN never is.
    """

    text: str
    contains: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class BodyField:
    """A control's field in the body of the OpenAI API, with vLLM's additions.

    Attributes:
        default: Its default there.
        bounds: What it is checked by there, in pydantic's words: {"ge": 0, "le": 1}.
        of_openai: Whether OpenAI's own client has an argument for it.
        is_number: Whether it is a number, as the control is. Fields of other types are `openai.protocol`'s.
        meaning: What docs/openai.md says of it; "": the control's meaning.
        name: The field; "": the control's name.
    """

    default: float = 0.0
    bounds: Mapping[str, float] = field(default_factory=lambda: {})
    of_openai: bool = False
    is_number: bool = True
    meaning: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ExecutorField:
    """A control's field in TensorRT-LLM's Executor API, where its default is None.

    Attributes:
        range: The values that it may be assigned.
        note: What docs/executor-fields.md says of it.
        name: The field of its SamplingConfig; "": the control's name.
    """

    range: Range
    note: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """How the playground shows a control, under the name of its field in a body.

    Attributes:
        group: Title of the group that it stands in.
        hint: A sentence about it.
        usual: The server's default, shown in the empty field; "": the body's.
    """

    group: str
    hint: str
    usual: str = ""


@dataclass(frozen=True, slots=True)
class Control:
    """All that is known of a sampling control beside its neutral value, which its field's default is.

    Attributes:
        dtype: The type of its tensor; what it holds, if it is a list.
        range: Its values.
        meaning: A line that config.pbtxt, the reference pages and command lines say of it.
        example: A value that asks for something.
        tensor: The tensor that it comes by; "": its own name.
        is_off: Whether a value asks for nothing although it is not the neutral one.
        looks_back: Whether the device then needs the tokens so far. The host writes them, and so has to see them.
        bans: Whether it may leave a sequence without a token to go on with.
        draws: Whether it limits the tokens that are drawn from, without which a request is greedy.
        text_names: The tensor's names in text models, the main one first; empty: its own.
        aliases: Other names of the tensor in id models.
        other_dtypes: More types that the tensor is read in.
        body: Its field in OpenAI's body; None: it has none.
        executor: Its field in the Executor API; None: it has none.
        client: The Python client's option; "": its own name; None: it has none.
        on_command_line: Whether that is an option of the client's command line too.
        setting: How the playground shows it; None: not at all.
    """

    dtype: str
    range: Range
    meaning: str
    example: Any
    tensor: str = ""
    is_off: Callable[[Any], bool] = lambda value: False
    looks_back: bool = False
    bans: bool = False
    draws: bool = False
    text_names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    other_dtypes: tuple[str, ...] = ()
    body: BodyField | None = None
    executor: ExecutorField | None = None
    client: str | None = ""
    on_command_line: bool = False
    setting: Setting | None = None

    def named(self, name: str) -> Control:
        """The control as the field `name` has it: each name that it leaves open is that one."""
        body, executor = self.body, self.executor
        return replace(
            self,
            tensor=self.tensor or name,
            body=body and replace(body, name=body.name or name),
            executor=executor and replace(executor, name=executor.name or name),
            client=name if self.client == "" else self.client,
        )
