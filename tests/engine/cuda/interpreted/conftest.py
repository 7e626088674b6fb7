"""Makes the interpreter of triton 3.7 about twice as fast.

It replaces the functions of `triton.language` by interpreted ones when a kernel is launched, and again
whenever the kernel calls another function, several hundred times per launch. Replaced functions stay replaced
until the launch ends, so this module replaces them only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from triton.runtime import interpreter


@pytest.fixture(autouse=True, scope="session")
def functions_replaced_once() -> Iterator[None]:
    replaced: set[Callable[..., Any]] = set()
    launch, replace = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def launch_anew(self: interpreter.GridExecutor, *arguments: Any, **constants: Any) -> None:
        replaced.clear()
        launch(self, *arguments, **constants)

    def replace_once(function: Callable[..., Any]) -> interpreter._LangPatchScope:
        if function in replaced:
            return interpreter._LangPatchScope()
        replaced.add(function)
        return replace(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield
