"""The classes with which `sampling_config` declares sampling controls: their properties for every protocol.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed values of a control, or of each element if the control is a list.

    Attributes:
        text: The range for error messages, such as "in [0, 1]".
        contains: Returns whether a value is allowed; False for NaN.
    """

    text: str
    contains: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class BodyField:
    """A control's field in the OpenAI API's request body, including vLLM's additions.

    Attributes:
        default: The field's default.
        bounds: The field's bounds as pydantic's keyword arguments, such as {"ge": 0, "le": 1}.
        of_openai: Whether OpenAI's own client has an argument for the field.
        is_number: Whether the field is a number like the control; otherwise `openai.protocol` declares the field.
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
        name: The field's name in the Executor API's SamplingConfig; "": the control's name.
        aliases: Further names of the field, from older versions of the API.
    """

    range: Range
    note: str
    name: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """The display of a control in the playground, under the name of its field in the request body.

    Attributes:
        group: Title of the group in which the control is shown.
        hint: A sentence that describes the control.
        usual: The default as shown in an empty field; "": the body field's default.
    """

    group: str
    hint: str
    usual: str = ""


@dataclass(frozen=True, slots=True)
class Control:
    """The properties of a sampling control other than its neutral value, which is the default of its field.

    Attributes:
        dtype: The type of the control's tensor, or of the elements of a list.
        range: The allowed values.
        meaning: One line of description for config.pbtxt, the reference pages and command lines.
        example: A value other than the neutral one.
        tensor: The name of the control's tensor; "": the control's name.
        is_off: Returns whether a value, other than the neutral one, means that the control is off.
        looks_back: Whether the device needs all tokens so far to apply the control, so that the host must see each
            token and send it.
        bans: Whether the control may ban every possible next token.
        draws: Whether the control limits the tokens to sample from. Without any such control a request is greedy.
        text_names: The tensor's names in text models, the main one first; empty: the tensor's name.
        aliases: Further names of the tensor in id models.
        other_dtypes: Further data types that the tensor may have.
        body: The control's field in the OpenAI request body; None: there is none.
        executor: The control's field in the Executor API; None: there is none.
        client: The Python client's option; "": the control's name; None: there is none.
        client_aliases: Further names of that option.
        ends_answer: Whether the client lists the option among those that end the answer.
        on_command_line: Whether the client's command line has the option too.
        setting: The control's display in the playground; None: it is not shown.
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
        """Return the control for the field `name`, with `name` in place of every empty name."""
        body, executor = self.body, self.executor
        return replace(
            self,
            tensor=self.tensor or name,
            body=body and replace(body, name=body.name or name),
            executor=executor and replace(executor, name=executor.name or name),
            client=name if self.client == "" else self.client,
        )
