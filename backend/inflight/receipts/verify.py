"""`scripts/verify`, or `inflight verify`: check a receipt, re-run its request, and compare the tokens.

Imports only the standard library until a receipt is read, so that `--help` needs no installation.
"""

from __future__ import annotations

import argparse
import hmac
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from inflight.arguments import Parser, program_name
from inflight.errors import InflightError
from inflight.server.option_types import setting

if TYPE_CHECKING:
    from inflight.receipts.document import OutputForm, Receipt

EQUAL, DIFFERENT, NOT_RERUN = 0, 1, 2
"""Exit codes."""
_NOT_PROMISED = "equal tokens are not promised"


def main(arguments: list[str] | None = None) -> int:
    """Verify the receipt that the command line names; print the findings and return the exit code."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="verify: %(message)s", stream=sys.stderr)
    try:
        is_file = given.receipt != "-"
        text = Path(given.receipt).read_text(encoding="utf-8") if is_file else sys.stdin.read()
        document = find_receipt(text)
    except json.JSONDecodeError as error:
        _say(f"{given.receipt}: cannot be read: not JSON ({error})")
        return NOT_RERUN
    except (OSError, ValueError) as error:
        _say(f"{given.receipt}: cannot be read: {getattr(error, 'strerror', None) or error}")
        return NOT_RERUN
    try:
        return _verify(document, given)
    except InflightError as error:
        _say(f"cannot be re-run: {error}")
        return NOT_RERUN


def _verify(document: dict[str, Any], given: argparse.Namespace) -> int:
    from inflight.receipts.document import parse

    fault = fault_of_seal(document, given.key)
    if fault:
        _say(fault)
        return DIFFERENT
    if given.key is None and document.get("signature"):
        _say("the signature is not checked: --key FILE checks it")
    receipt = parse(document)

    from inflight.receipts.rerun import Rerun, Sources
    from inflight.server.repository import default_repository

    sources = Sources(default_repository(), given.model, given.revision, given.lora, dict(given.set))
    rerun = Rerun(receipt, sources)
    others = list(differing_files(receipt.model.files, rerun.files()))
    for line in others:
        _say(line)
    again = rerun.run()
    for line in differing_environment(receipt, again):
        _say(line)
    before, now = receipt.request.adapter, again.request.adapter
    if before is not None and now is not None and before.digest != now.digest:
        others.append(f"the adapter has another content: {now.digest}, in the receipt {before.digest}")
        _say(others[-1])
    difference = first_difference(receipt, again)
    count = sum(len(output.token_ids) for output in receipt.outputs)
    _say(f"different: {difference}" if difference else f"equal: {count} tokens")
    if others:
        _say("this is not the model of the receipt, as shown above")
    return DIFFERENT if difference or others else EQUAL


# ---------------------------------------------------------------------- the receipt itself


def find_receipt(text: str) -> dict[str, Any]:
    """Return the receipt in a text: a receipt, or an answer with one; raise ValueError if there is none."""
    found: Any = json.loads(text)
    if _is_object(found) and "receipt" in found:
        inner = found["receipt"]
        found = json.loads(inner) if isinstance(inner, str) else inner
    if not _is_object(found) or "digest" not in found:
        raise ValueError("it is neither a receipt nor an answer that has one")
    return found


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def fault_of_seal(document: dict[str, Any], key: Path | None) -> str:
    """Return what is wrong with a receipt's digest, or with its signature if there is a key; "" if nothing."""
    from inflight.receipts.document import canonical, digest_of, read_key, signature_of

    content = canonical(document)
    if document.get("digest") != digest_of(content):
        return "the receipt was altered: its digest is not that of its content"
    if key is None:
        return ""
    signature = document.get("signature")
    if not signature:
        return "the receipt is not signed"
    if not hmac.compare_digest(str(signature).encode(), signature_of(content, read_key(key)).encode()):
        return "the receipt was not signed with this key"
    return ""


# ---------------------------------------------------------------------- comparing


def differing_files(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each file of the model that is not the receipt's."""
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            yield f"{name} is missing here"
        elif name not in before:
            yield f"{name} is here, and the receipt's model does not have it"
        elif before[name] != now[name]:
            yield f"{name} has another content: {now[name]}, in the receipt {before[name]}"


def differing_environment(receipt: Receipt, again: Receipt) -> Iterator[str]:
    """Yield a line for each difference of software, code and settings with which tokens may differ."""
    for package in sorted(receipt.software.keys() | again.software.keys()):
        before, now = receipt.software.get(package, "none"), again.software.get(package, "none")
        if before != now:
            yield f"{_NOT_PROMISED}: {package} was {before}, here it is {now}"
    for name in ("dtype", "kernels", "device", "instruction_set"):
        before, now = getattr(receipt.engine, name), getattr(again.engine, name)
        if before != now:
            yield f"{_NOT_PROMISED}: {name} was {before or 'none'}, here it is {now or 'none'}"
    settings = receipt.engine.parameters, again.engine.parameters
    for key in sorted(settings[0].keys() | settings[1].keys()):
        # Pipeline stages compute the same as one rank.
        if settings[0].get(key) != settings[1].get(key) and key != "pipeline_parallel_size":
            before, now = (each.get(key, "the default") for each in settings)
            yield f"{_NOT_PROMISED}: {key} was {before}, here it is {now}"


def first_difference(receipt: Receipt, again: Receipt) -> str:
    """Return the first difference of the outputs; "" if there is none.

    If a client or a deadline ended an output, only its tokens until then are compared.
    """
    if len(receipt.outputs) != len(again.outputs):
        return f"{len(again.outputs)} outputs, in the receipt {len(receipt.outputs)}"
    for number, (before, now) in enumerate(zip(receipt.outputs, again.outputs)):
        difference = _difference(before, now)
        if difference:
            return f"output {number}, {difference}" if len(receipt.outputs) > 1 else difference
    return ""


def _difference(before: OutputForm, now: OutputForm) -> str:
    from inflight.receipts.rerun import CUT_OUTPUTS

    was_cut = before.finish_reason in CUT_OUTPUTS
    again = now.token_ids[: len(before.token_ids)] if was_cut else now.token_ids
    for position, (old, new) in enumerate(zip(before.token_ids, again)):
        if old != new:
            return f"token {position} is {new}, in the receipt {old}"
    if len(before.token_ids) != len(again):
        return f"{len(again)} tokens, in the receipt {len(before.token_ids)}"
    if not was_cut and before.finish_reason != now.finish_reason:
        return f"the end is {now.finish_reason}, in the receipt {before.finish_reason}"
    return ""


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program_name("scripts/verify"),
        description="Check a receipt, re-run its request in this process, and compare the tokens. "
        "Exit code 0: equal, 1: they differ, or the receipt or the model is not the original, "
        "2: wrong usage, or the request cannot be re-run.",
    )
    add = parser.add_argument
    add(
        "receipt",
        metavar="RECEIPT",
        help="file with a receipt, or with an answer that contains a receipt; - means standard input",
    )
    add("--model", metavar="DIR_OR_HF_ID", help="the model that the receipt names (default: the demo model)")
    add("--revision", metavar="REVISION", help="branch, tag or commit of a --model from the Hugging Face hub")
    add("--lora", type=Path, metavar="FOLDER", help="PEFT folder of the request's adapter")
    add(
        "--key",
        type=Path,
        metavar="FILE",
        help="check the receipt's signature with the key in this file",
    )
    add("--set", metavar="KEY=VALUE", type=setting, action="append", default=[], help="as for scripts/serve")
    return parser


if __name__ == "__main__":
    sys.exit(main())
