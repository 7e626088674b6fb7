"""The command line: `python -m inflight_client` with `generate`, `chat`, `state`, `adapters` or `convert-lora`.

Imports only the standard library until a command runs; `chat` needs nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from importlib import metadata
from typing import TYPE_CHECKING

from inflight_client.arguments import Parser
from inflight_client.chat import chat
from inflight_client.errors import ServerError
from inflight_client.guide import GUIDE_TYPES, Guide
from inflight_client.keywords import CHOOSING, ENDING, QUEUEING, Option

if TYPE_CHECKING:
    from inflight_client.client import Client
    from inflight_client.results import Completion, Delta, Sequence

_INTERRUPTED = 130  # a shell's exit status after Ctrl-C
_UNDER_ANOTHER_NAME = (
    "stop_words",
    "bad_words",
    "num_return_sequences",
    "prompt_lookup_num_tokens",
    "return_log_probs",
    "lora",
)
_UNDER_ITS_NAME = tuple(
    name for group in (CHOOSING, ENDING, QUEUEING) for name, option in group.items() if option.help
)


def main(arguments: Seq[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parse(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as in `… --stream | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed at exit
        return 0
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is missing: {_installation()}", file=sys.stderr)
        return 1
    except (ServerError, ValueError, OSError) as error:
        status = f"{error.status}: " if isinstance(error, ServerError) else ""
        print(f"error: {status}{error}", file=sys.stderr)
        return 1
    return 0


def _client(options: argparse.Namespace) -> Client:
    from inflight_client.client import Client

    return Client(options.url.rpartition("://")[2].rstrip("/"), options.model)


def _generate(options: argparse.Namespace) -> None:
    client = _client(options)
    prompt = options.prompt if options.ids is None else options.ids
    keywords = {name: getattr(options, name) for name in (*_UNDER_ITS_NAME, *_UNDER_ANOTHER_NAME)}
    if options.guide_type is not None:
        keywords["guide"] = Guide(options.guide_type, options.guide or "")
    as_ids = options.ids is not None
    if options.stream:
        _print_stream(client.stream(prompt, options.max_tokens, **keywords), as_ids)
    else:
        _print_answers(client.generate(prompt, options.max_tokens, **keywords), as_ids)


def _chat(options: argparse.Namespace) -> None:
    address = options.url.rstrip("/").removesuffix("/v1")
    url = address if "://" in address else f"http://{address}"
    chat(url, options.system, options.max_tokens, sys.stdin, sys.stdout)


def _state(options: argparse.Namespace) -> None:
    print(json.dumps(_client(options).state(), indent=2))


def _convert_lora(options: argparse.Namespace) -> None:
    from inflight_client.lora import convert_lora

    convert_lora(options.folder, options.out, options.storage_type)


def _adapters(options: argparse.Namespace) -> None:
    client = _client(options)
    if options.load is not None:
        adapters = client.load_adapter(options.load, options.path)
    elif options.unload is not None:
        adapters = client.unload_adapter(options.unload)
    else:
        adapters = client.adapters()
    print(json.dumps([dataclasses.asdict(each) for each in adapters], indent=2))


def _print_stream(deltas: Iterable[Delta], as_ids: bool) -> None:
    from inflight_client.results import completion

    separator = ""
    shown = []
    for delta in deltas:
        if as_ids and delta.token_ids:
            print(separator, end="")
            separator = ","
        print(_shown(delta, as_ids), end="", flush=True)
        shown.append(delta)
    print()
    _print_log_probs(completion(shown))


def _print_answers(answer: Completion, as_ids: bool) -> None:
    for index, sequence in enumerate(answer.sequences):
        number = f"[{index}] " if len(answer.sequences) > 1 else ""
        print(number + _shown(sequence, as_ids))
        _print_log_probs(sequence)


def _shown(answer: Delta | Sequence, as_ids: bool) -> str:
    return ",".join(map(str, answer.token_ids)) if as_ids else answer.text


def _print_log_probs(answer: Completion | Sequence) -> None:
    """Print log probabilities to standard error, so that standard output has only the answer."""
    if answer.cum_log_prob is not None:
        each = " ".join(f"{value:.4f}" for value in answer.log_probs)
        print(f"log_probs {each} sum {answer.cum_log_prob:.4f}", file=sys.stderr)


def _is_command_of_inflight() -> bool:
    return sys.argv[0] == "inflight client"


def _version() -> str:
    """Return the version of the installed client, or of the package that contains it."""
    for package in ("inflight-client", "inflight"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return "unknown"


def _installation() -> str:
    """Return the command that installs what the client needs."""
    package = "'inflight[kserve]'" if _is_command_of_inflight() else "'tritonclient[grpc]'"
    return f"pip install {package}"


def _parse(arguments: Seq[str] | None) -> argparse.Namespace:
    program = sys.argv[0] if _is_command_of_inflight() else "python -m inflight_client"
    parser = Parser(
        "generate 'The capital of France is'", prog=program, description="Ask the server for text."
    )
    parser.add_argument("--version", action="version", version=f"inflight {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate", example="'The capital of France is'", help="continue a prompt and print the answer"
    )
    generate.set_defaults(run=_generate)
    _add_request(generate)
    _add_choosing(generate)
    _add_ending(generate)
    _add_group(generate, "among other requests", QUEUEING)
    state = commands.add_parser("state", help="print the state of the server's batcher, as JSON")
    state.set_defaults(run=_state)
    _add_server(state, "the model to ask, tensorrt_llm by default")
    _add_chat(commands.add_parser("chat", help="send lines as messages of a chat, and print the answers"))
    _add_convert_lora(commands)
    _add_adapters(
        commands.add_parser(
            "adapters", help="load or unload a LoRA adapter, if asked, and print all adapters, as JSON"
        )
    )
    options = parser.parse_args(arguments)
    if options.run is _adapters and options.path is not None and options.load is None:
        parser.error("--path needs --load")
    if options.run is _generate and options.guide is not None and options.guide_type is None:
        generate.error("--guide needs --guide-type")
    if (
        options.run is _generate
        and options.stream
        and (options.num_return_sequences or options.beam_width or 1) > 1
    ):
        generate.error("--stream shows one answer as it comes: leave out --n and --beam-width")
    return options


def _add_chat(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_chat)
    command.add_argument(
        "--url", default="http://localhost:9000", help="address of /v1 (http://localhost:9000)"
    )
    command.add_argument("--system", metavar="TEXT", help="the system message")
    command.add_argument("--max-tokens", type=int, metavar="N", help="maximum number of tokens of an answer")


def _add_convert_lora(commands: argparse._SubParsersAction[Parser]) -> None:
    convert = commands.add_parser(
        "convert-lora",
        example="PEFT_FOLDER OUT",
        help="write a PEFT folder's adapter as the arrays lora_weights and lora_config",
    )
    convert.set_defaults(run=_convert_lora)
    convert.add_argument("folder", metavar="PEFT_FOLDER", help="the folder written by PEFT's save_pretrained")
    convert.add_argument("out", metavar="OUT", help="the folder for both files; created if it is missing")
    convert.add_argument(
        "--storage-type",
        choices=("float16", "float32", "bfloat16"),
        default="float16",
        help="type of the numbers (float16)",
    )


def _add_request(generate: argparse.ArgumentParser) -> None:
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", nargs="?", help="the prompt as text")
    prompt.add_argument(
        "--ids", type=_ids, metavar="1,2,3", help="the prompt as token ids; the answer is ids too"
    )
    generate.add_argument("--stream", action="store_true", help="print tokens as they are generated")
    generate.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="maximum number of tokens to generate (128)"
    )
    generate.add_argument(
        "--lora", type=_name_or_id, metavar="NAME|ID", help="the LoRA adapter to answer with"
    )
    _add_server(generate, "by default ensemble for text and tensorrt_llm for ids")


def _add_adapters(adapters: argparse.ArgumentParser) -> None:
    adapters.set_defaults(run=_adapters)
    change = adapters.add_mutually_exclusive_group()
    change.add_argument("--load", metavar="NAME", help="load an adapter now and not with its first request")
    change.add_argument(
        "--unload",
        type=_name_or_id,
        metavar="NAME|ID",
        help="free an adapter's memory once no request uses it",
    )
    adapters.add_argument(
        "--path",
        metavar="FOLDER",
        help="with --load: the adapter's folder below the server's lora_dir, for a new name",
    )
    _add_server(adapters, "the model to ask, tensorrt_llm by default")


def _add_server(command: argparse.ArgumentParser, model_help: str) -> None:
    command.add_argument("--url", default="localhost:8001", help="the server's gRPC port (localhost:8001)")
    command.add_argument("--model", help=model_help)


def _add_choosing(generate: argparse.ArgumentParser) -> None:
    group = _add_group(generate, "sampling", CHOOSING)
    group.add_argument("--bad-word", action="append", dest="bad_words", metavar="TEXT",
        help="a word to ban, in its usual tokens; repeatable")  # fmt: skip
    group.add_argument(
        "--n", type=int, dest="num_return_sequences", metavar="N", help="how many answers to print"
    )
    group.add_argument(
        "--prompt-lookup",
        type=int,
        dest="prompt_lookup_num_tokens",
        metavar="N",
        help="draft up to N tokens at a time from earlier text: faster if text repeats itself; in "
        "float32 the text stays the same",
    )
    group.add_argument(
        "--guide-type", choices=GUIDE_TYPES, help="the answer's format; all types except json need --guide"
    )
    group.add_argument("--guide", metavar="TEXT", help="the schema, expression, grammar or tags")
    group.add_argument("--log-probs", action="store_true", default=None, dest="return_log_probs",
        help="print the tokens' log probabilities to stderr")  # fmt: skip


def _add_ending(generate: argparse.ArgumentParser) -> None:
    group = _add_group(generate, "where the answer ends", ENDING)
    group.add_argument(
        "--stop",
        action="append",
        dest="stop_words",
        metavar="TEXT",
        help="stop word, before which the answer ends; repeatable",
    )


def _add_group(
    generate: argparse.ArgumentParser, title: str, options: Mapping[str, Option]
) -> argparse._ArgumentGroup:
    group = generate.add_argument_group(title)
    for name, option in options.items():
        if option.help:
            kinds = {"float32": (float, "X"), "object": (str, "NAME")}
            kind, metavar = kinds.get(option.dtype, (int, "N"))
            group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=option.help)
    return group


def _name_or_id(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids like 1,2,3, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
