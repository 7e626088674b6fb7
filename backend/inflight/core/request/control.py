"""The declaration of a sampling control: its properties besides type and neutral value, for every protocol. Pure.

`sampling_config` declares the controls with these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed values of a control, or of each element if the control is a list.

    Attributes:
        text: The range for error messages, such as "in [0, 1]".
        contains: Whether a value is allowed; NaN never is.
    """

    text: str
    contains: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class BodyField:
    """A control's field in the OpenAI API's request body, including vLLM's additions.

    Attributes:
        default: The field's default.
        bounds: The field's bounds as pydantic's keyword arguments, such as {"ge": 0, "le": 1}.
        of_openai: Whether OpenAI's own client has an argument for it.
        is_number: Whether the field is a number like the control. `openai.protocol` declares fields of other
            types.
        meaning: The field's description in docs/openai.md; "": the control's meaning.
        name: The field's name; "": the control's name.
    """

    default: float = 0.0
    bounds: Mapping[str, float] = field(default_factory=lambda: {})
    of_openai: bool = False
    is_number: bool = True
    meaning: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ExecutorField:
    """A control's field in TensorRT-LLM's Executor API, whose default is None.

    Attributes:
        range: The allowed values of the field.
        note: The field's description in docs/executor-fields.md.
        name: The field of its SamplingConfig; "": the control's name.
        aliases: Further names of the field, from older versions of the API.
    """

    range: Range
    note: str
    name: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """How the playground shows a control, under the name of its field in a body.

    Attributes:
        group: Title of the group it is shown in.
        hint: A sentence about it.
        usual: The placeholder for the default in the empty field; "": the body field's default.
    """

    group: str
    hint: str
    usual: str = ""


@dataclass(frozen=True, slots=True)
class Control:
    """The properties of a sampling control besides its neutral value, which is the default of its field.

    Attributes:
        dtype: The type of its tensor, or of the elements of a list.
        range: The allowed values.
        meaning: One line of description for config.pbtxt, the reference pages and command lines.
        example: A value other than the neutral one.
        tensor: The name of its tensor; "": the control's name.
        is_off: Whether a value other than the neutral one also means off.
        looks_back: Whether the device then needs all tokens so far, which the host sends it and so must see first.
        bans: Whether it may ban every possible next token.
        draws: Whether it limits the tokens to sample from. Without any such control a request is greedy.
        text_names: The tensor's names in text models, the main one first; empty: the tensor's name.
        aliases: Further names of the tensor in id models.
        other_dtypes: Further data types that the tensor may have.
        body: Its field in the OpenAI body; None: it has none.
        executor: Its field in the Executor API; None: it has none.
        client: The Python client's option; "": the control's name; None: it has none.
        client_aliases: Further names of that option.
        ends_answer: Whether the client lists the option among those that end the answer.
        on_command_line: Whether the client's command line has the option too.
        setting: How the playground shows it; None: it does not.
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
    client_aliases: tuple[str, ...] = ()
    ends_answer: bool = False
    on_command_line: bool = False
    setting: Setting | None = None

    def named(self, name: str) -> Control:
        """Return the control of the field `name`: every name left empty becomes `name`."""
        body, executor = self.body, self.executor
        return replace(
            self,
            tensor=self.tensor or name,
            body=body and replace(body, name=body.name or name),
            executor=executor and replace(executor, name=executor.name or name),
            client=name if self.client == "" else self.client,
        )
