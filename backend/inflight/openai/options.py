"""Command-line options of the OpenAI endpoint, for `scripts/serve` and for `python -m inflight.openai`.

Declares the flags that both commands have, and reads API keys. Files are checked here, so that an invalid
file is reported before anything is started. Imports only the standard library, because `scripts/serve`
imports it first, and jinja2 if a template is given. Any thread.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from inflight.arguments import folder_name, output_file
from inflight.openai.batches import CONCURRENCY
from inflight.pictures import options as picture_options
from inflight.pooling import CONVERSIONS
from inflight.serving.chat import reasoning_formats, tool_format_table

API_KEYS_VARIABLE = "INFLIGHT_API_KEY"
"""The environment variable with API keys, separated by spaces, commas or line ends."""

TOOL_CALL_PARSERS = ("auto", "none", *tool_format_table.TOOL_CALL_PARSERS)
REASONING_PARSERS = ("auto", "none", *reasoning_formats.REASONING_PARSERS)

MAX_BODY_BYTES = 16 << 20
MAX_STORED_RESPONSES = 1000
MAX_STORED_BYTES = 64 << 20
MAX_BATCH_BYTES = 1 << 30
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True)
class OpenAiOptions:
    """Settings of one OpenAI endpoint: its address, access, and names of its model.

    Attributes:
        host: Address to listen on.
        port: TCP port; 0: any free one.
        served_model_names: Names of the model in requests; responses have the first name. If empty, the name
            is the checkpoint's folder.
        chat_template: File with a Jinja template; None: the checkpoint's own template.
        tool_call_parser: One of TOOL_CALL_PARSERS: the form in which the model writes tool calls.
        reasoning_parser: One of REASONING_PARSERS: how the model marks its reasoning.
        default_max_tokens: Largest number of tokens of an answer whose request sets no limit, or fewer if
            fewer fit. None: 16 for completions, as in OpenAI's API; for chats, as many as fit.
        api_keys: Every request must have one of these keys. If empty, all requests are allowed.
        cors_origins: Origins of web pages that may send requests from a browser; "*": all.
        max_body_bytes: Size of the largest allowed body of a request, in bytes.
        tls_certificate: PEM file with the certificate chain; None: no TLS.
        tls_key: PEM file with the private key; None: the key is in `tls_certificate`.
        metrics_url: URL of Triton's metrics page, for /metrics; "": no page.
        pictures: Socket of the process that encodes pictures; None: pictures are refused.
        allowed_media_domains: Hosts from which pictures are read, in lower case; "*.HOST": all hosts below HOST.
        allowed_local_media_path: Folder of this machine from which pictures are read; None: none.
        max_pictures: Largest number of pictures in a prompt.
        convert: One of CONVERSIONS: whether the model embeds or classifies texts, or scores pairs of them, instead
            of generating text.
        max_stored_responses: Largest number of responses of /v1/responses that are kept; 0: none.
        max_stored_bytes: Largest size in bytes of the kept responses with their conversations.
        response_store: File that keeps these responses across restarts; None: they are in memory only.
        batch_dir: Folder of the files and states of /v1/files and /v1/batches; None: these routes are refused.
        max_batch_bytes: Largest size of this folder in bytes.
        batch_concurrency: Largest number of requests in flight that come from batches.
    """

    host: str = "127.0.0.1"
    port: int = 9000
    served_model_names: tuple[str, ...] = ()
    chat_template: Path | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    default_max_tokens: int | None = None
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    metrics_url: str = ""
    pictures: Path | None = None
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: Path | None = None
    max_pictures: int = picture_options.MAX_PICTURES
    convert: str = "auto"
    max_stored_responses: int = MAX_STORED_RESPONSES
    max_stored_bytes: int = MAX_STORED_BYTES
    response_store: Path | None = None
    batch_dir: Path | None = None
    max_batch_bytes: int = MAX_BATCH_BYTES
    batch_concurrency: int = CONCURRENCY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that exist for local and remote engines. Flags that vLLM also has are named as in vLLM."""
    group = parser.add_argument_group("OpenAI endpoint (/v1)")
    _add_model_arguments(group.add_argument)
    _add_listening_arguments(group.add_argument)
    _add_batch_arguments(group.add_argument)
    picture_options.add_arguments(parser.add_argument_group("pictures of requests").add_argument)


def _add_model_arguments(add: Callable[..., argparse.Action]) -> None:
    add(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        type=_name,
        default=[],
        help="names of the model in requests to /v1; answers have the first of these names (default: the "
        "name of the checkpoint's folder)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        type=_template,
        help="a Jinja template for chats (default: the checkpoint's)",
    )
    add(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        default="auto",
        help="the form in which the model writes tool calls; none: tool calls stay part of the text "
        "(default: auto, which recognizes the form by the chat template)",
    )
    add(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        help="how the model marks its reasoning before the answer; none: reasoning stays part of the answer "
        "(default: auto, which recognizes the form by the chat template)",
    )
    add(
        "--default-max-tokens",
        metavar="N",
        type=_count,
        help="maximum number of tokens of an answer whose request sets no max_tokens (default: 16 for "
        "completions; for chats, as many tokens as fit)",
    )

    add(
        "--convert",
        choices=CONVERSIONS,
        default="auto",
        help="what the model is used for; none: text generation; embed: /v1/embeddings; classify: "
        "/v1/classify if the checkpoint has a head for sequence classification, otherwise /v1/rerank and "
        "/v1/score; auto: the same as classify if the checkpoint has a head for sequence classification, the "
        "same as embed if it has a pooling configuration of sentence-transformers, and otherwise the same as "
        "none (default: auto)",
    )


def _add_listening_arguments(add: Callable[..., argparse.Action]) -> None:
    add(
        "--api-key",
        metavar="KEY",
        nargs="+",
        default=[],
        help="requests to /v1 must have one of these keys. Every user of this machine can read the keys in "
        f"the command line, so prefer --api-key-file or the environment variable {API_KEYS_VARIABLE}",
    )
    add("--api-key-file", metavar="FILE", type=_file, help="a file with an API key on each line")
    add(
        "--allowed-origins",
        metavar="ORIGINS",
        type=_origins,
        default=(),
        help="origins of web pages that may use /v1: a JSON list such as '[\"https://chat.example\"]', or "
        "origins separated by commas; * allows all origins (default: only the playground's own)",
    )
    add(
        "--max-body-size",
        metavar="SIZE",
        type=_size,
        default=MAX_BODY_BYTES,
        help="maximum size of the body of a request to /v1, in bytes or with a unit, such as 64M (default: "
        "16M)",
    )
    add(
        "--max-stored-responses",
        metavar="N",
        type=_number,
        default=MAX_STORED_RESPONSES,
        help="maximum number of responses of /v1/responses that are kept for previous_response_id; if there "
        "are more, the oldest are dropped; 0: none are kept (default: %(default)s)",
    )
    add(
        "--max-stored-responses-size",
        metavar="SIZE",
        type=_size,
        default=MAX_STORED_BYTES,
        help="maximum size, such as 500M, of all kept responses of /v1/responses together, including their "
        "conversations (default: 64M)",
    )
    add(
        "--response-store",
        metavar="FILE",
        type=output_file,
        help="also keep the responses of /v1/responses in this SQLite file, so that they outlive a restart",
    )
    add(
        "--ssl-certfile",
        metavar="FILE",
        type=_file,
        help="serve /v1 over TLS with this certificate chain (PEM)",
    )
    add(
        "--ssl-keyfile",
        metavar="FILE",
        type=_file,
        help="file with the private key of the certificate (default: the file of --ssl-certfile)",
    )


def _add_batch_arguments(add: Callable[..., argparse.Action]) -> None:
    add(
        "--batch-dir",
        metavar="DIR",
        type=_folder,
        help="folder for the files of /v1/files and the state of /v1/batches, so that batches continue after "
        "a restart; without this flag, requests to /v1/files and /v1/batches are refused",
    )
    add(
        "--batch-dir-size",
        metavar="SIZE",
        type=_size,
        default=MAX_BATCH_BYTES,
        help="maximum size of --batch-dir, such as 500M (default: 1G)",
    )
    add(
        "--batch-concurrency",
        metavar="N",
        type=_count,
        default=CONCURRENCY,
        help="how many requests of all batches together may be in flight at a time; N should be less than "
        "max_batch_size (default: %(default)s)",
    )


def read_arguments(
    given: argparse.Namespace,
    host: str,
    port: int,
    metrics_url: str = "",
    environment: Mapping[str, str] = os.environ,
    pictures: Path | None = None,
) -> OpenAiOptions:
    """Return the options from parsed flags. Raises ValueError, which names the flag, if a flag is invalid."""
    if given.ssl_keyfile is not None and given.ssl_certfile is None:
        raise ValueError(f"--ssl-keyfile {given.ssl_keyfile}: a key without --ssl-certfile, its certificate")
    if given.ssl_certfile is not None:
        _check_certificate(given.ssl_certfile, given.ssl_keyfile)
    return OpenAiOptions(
        host=host,
        port=port,
        served_model_names=tuple(given.served_model_name),
        chat_template=given.chat_template,
        tool_call_parser=given.tool_call_parser,
        reasoning_parser=given.reasoning_parser,
        default_max_tokens=given.default_max_tokens,
        api_keys=_api_keys(given, environment),
        cors_origins=tuple(given.allowed_origins),
        max_body_bytes=given.max_body_size,
        tls_certificate=given.ssl_certfile,
        tls_key=given.ssl_keyfile,
        metrics_url=metrics_url,
        pictures=pictures,
        allowed_media_domains=picture_options.allowed_domains(given),
        allowed_local_media_path=given.allowed_local_media_path,
        max_pictures=given.limit_mm_per_prompt,
        convert=given.convert,
        max_stored_responses=given.max_stored_responses,
        max_stored_bytes=given.max_stored_responses_size,
        response_store=given.response_store,
        batch_dir=given.batch_dir,
        max_batch_bytes=given.batch_dir_size,
        batch_concurrency=given.batch_concurrency,
    )


def to_arguments(options: OpenAiOptions) -> list[str]:
    """Return the command line of `python -m inflight.openai` for these options, without API keys."""
    files = {
        "--chat-template": options.chat_template,
        "--ssl-certfile": options.tls_certificate,
        "--ssl-keyfile": options.tls_key,
        "--pictures": options.pictures,
        "--response-store": options.response_store,
        "--batch-dir": options.batch_dir,
    }
    names, origins, default = options.served_model_names, options.cors_origins, options.default_max_tokens
    return [
        *("--host", options.host, "--port", str(options.port)),
        *(("--served-model-name", *names) if names else ()),
        *(word for flag, file in files.items() if file is not None for word in (flag, str(file.absolute()))),
        *("--convert", options.convert),
        *("--tool-call-parser", options.tool_call_parser, "--reasoning-parser", options.reasoning_parser),
        *(("--default-max-tokens", str(default)) if default is not None else ()),
        *(("--allowed-origins", json.dumps(origins)) if origins else ()),
        *("--max-body-size", str(options.max_body_bytes)),
        *("--max-stored-responses", str(options.max_stored_responses)),
        *("--max-stored-responses-size", str(options.max_stored_bytes)),
        *("--batch-dir-size", str(options.max_batch_bytes)),
        *("--batch-concurrency", str(options.batch_concurrency)),
        *picture_options.to_arguments(
            options.allowed_media_domains, options.allowed_local_media_path, options.max_pictures
        ),
        *(("--metrics-url", options.metrics_url) if options.metrics_url else ()),
    ]


def _api_keys(given: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    keys = [*given.api_key, *re.split(r"[\s,]+", environment.get(API_KEYS_VARIABLE, ""))]
    if given.api_key_file is not None:
        try:
            lines = given.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {given.api_key_file}: it cannot be read: {error}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:  # an empty file must not allow all requests
            raise ValueError(f"--api-key-file {given.api_key_file}: there is no key in it")
        keys += found
    if "" in given.api_key:
        raise ValueError("--api-key: got an empty key")
    keys = [key for key in keys if key]
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ValueError("an API key has letters that an HTTP header cannot hold: expected printable ASCII")
    if any(re.search(r"[\s,]", key) for key in keys):  # these separate keys in the environment variable
        raise ValueError("an API key has a space or a comma in it: expected one without")
    return tuple(dict.fromkeys(keys))


def _name(text: str) -> str:
    """Return a name of the model, which must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a name, got {text!r}")
    return text


def _file(text: str) -> Path:
    path = Path(text).expanduser()
    try:
        path.open("rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return path


def _folder(text: str) -> Path:
    """Return a folder that this process can write to, which is made if it is missing."""
    path = folder_name(text).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise argparse.ArgumentTypeError(f"{text}: expected a folder, got a file") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text}: this user cannot write to this folder")
    return path


def _template(text: str) -> Path:
    """Return the path of a chat template, after checking that the template compiles."""
    from inflight.serving.chat.template_environment import compile_template, names_in

    path = _file(text)
    try:
        source = path.read_text(encoding="utf-8")
        if not source.strip():
            raise ValueError("it is empty, expected a Jinja template")
        compile_template(source)
        names = names_in(source)
    except Exception as error:  # for invalid templates jinja2 raises errors without a common base class
        line = getattr(error, "lineno", None)
        raise argparse.ArgumentTypeError(f"{text}{f', line {line}' if line else ''}: {error}") from None
    if "messages" not in names:
        raise argparse.ArgumentTypeError(
            f"{text}: not a chat template, because it does not use the variable messages"
        )
    return path


def _check_certificate(chain: Path, key: Path | None) -> None:
    where = f"--ssl-certfile {chain}" + (f", --ssl-keyfile {key}" if key else "")

    def refuse_password() -> str:
        raise ValueError(f"{where}: the key is encrypted, expected one without a passphrase")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, refuse_password)
    except OSError as error:  # includes ssl.SSLError
        other = "" if key else "; --ssl-keyfile names the key if it is in another file"
        raise ValueError(
            f"{where}: cannot be used for TLS, expected a certificate and its own key in PEM format{other}: "
            f"{error}"
        ) from None


def _origins(text: str) -> tuple[str, ...]:
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text.split(",")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list: {error}") from None
    origins = [origin.strip() if isinstance(origin, str) else origin for origin in found]
    for origin in origins:
        if origin != "*" and not _is_origin(origin):
            raise argparse.ArgumentTypeError(
                f"{origin!r} is not an origin, expected one such as https://chat.example"
            )
    return tuple(origins)


def _is_origin(origin: object) -> bool:
    if not isinstance(origin, str):
        return False
    parts = urlsplit(origin)
    return bool(parts.scheme and parts.netloc) and f"{parts.scheme}://{parts.netloc}" == origin


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text!r}")
    return int(text)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"expected a number of bytes, such as 1048576 or 64M, got {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]
