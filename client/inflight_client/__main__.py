"""`python -m inflight_client generate "a prompt"`: the client on the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence

from inflight_client.client import Client
from inflight_client.errors import ServerError
from inflight_client.results import Completion, Delta

_INTERRUPTED = 130  # what shells make of Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parse(arguments)
    client = Client(options.url, options.model)
    prompt = options.prompt if options.ids is None else options.ids
    ask = client.stream if options.stream else client.generate
    try:
        answer = ask(
            prompt,
            options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            end_id=options.end_id,
        )
        _print(answer if options.stream else [answer], as_ids=options.ids is not None)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read the answer has enough of it, as in `… --stream | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where the interpreter flushes to
        return 0
    except (ServerError, ValueError) as error:
        status = f"{error.status}: " if isinstance(error, ServerError) else ""
        print(f"error: {status}{error}", file=sys.stderr)
        return 1
    return 0


def _print(deltas: Iterable[Delta | Completion], as_ids: bool) -> None:
    separator = ""
    for delta in deltas:
        if as_ids and delta.token_ids:
            print(separator, end="")
            separator = ","
        print(",".join(map(str, delta.token_ids)) if as_ids else delta.text, end="", flush=True)
    print()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m inflight_client", description="Ask the server for text.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="continue a prompt and print what comes")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", nargs="?", help="the prompt as text")
    prompt.add_argument(
        "--ids", type=_ids, metavar="1,2,3", help="the prompt as token ids; the answer is ids too"
    )
    generate.add_argument("--stream", action="store_true", help="print tokens as they come")
    generate.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="most tokens to generate (128)"
    )
    generate.add_argument("--url", default="localhost:8001", help="the server's gRPC port (localhost:8001)")
    generate.add_argument("--model", help="by default ensemble for text and tensorrt_llm for ids")
    generate.add_argument("--temperature", type=float, help="divides the logits; 0 is greedy")
    generate.add_argument("--top-k", type=int, help="sample from the k likeliest tokens")
    generate.add_argument(
        "--top-p", type=float, help="sample from the likeliest tokens of this total probability"
    )
    generate.add_argument("--seed", type=int, help="of the random numbers: the same seed, the same answer")
    generate.add_argument("--end-id", type=int, help="token id that ends the answer; -1 for none")
    return parser.parse_args(arguments)


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids like 1,2,3, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
