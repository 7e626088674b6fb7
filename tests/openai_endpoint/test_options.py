"""The flags of the OpenAI endpoint, as both commands read them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from inflight.openai import __main__ as openai_command
from inflight.openai.options import (
    API_KEYS_VARIABLE,
    OpenAiOptions,
    add_arguments,
    read_arguments,
    to_arguments,
)
from inflight.server import cli
from inflight.serving.chat.reasoning_formats import REASONING_PARSERS
from inflight.serving.chat.tool_format_table import TOOL_CALL_PARSERS
from tests.openai_endpoint.serving import make_certificate


def read(*arguments: str, environment: dict[str, str] | None = None) -> OpenAiOptions:
    parser = argparse.ArgumentParser()
    for flag in ("--host", "--metrics-url"):
        parser.add_argument(flag, default="")
    parser.add_argument("--port", type=int, default=9000)
    add_arguments(parser)
    given = parser.parse_args(arguments)
    return read_arguments(given, given.host or "127.0.0.1", given.port, given.metrics_url, environment or {})


def test_defaults_equal_the_options_defaults() -> None:
    assert read() == OpenAiOptions()


def test_to_arguments_keeps_all_options_except_keys(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    template, certificate, key = map(str, (tmp_path / "chat.jinja", *make_certificate(tmp_path)))
    found = read(
        *("--served-model-name", "code", "gpt-4o", "--chat-template", template),
        *("--ssl-certfile", certificate, "--ssl-keyfile", key, "--api-key", "secret"),
        *("--allowed-origins", '["https://chat.example", "http://localhost:3000"]', "--max-body-size", "2M"),
        *("--tool-call-parser", "hermes", "--reasoning-parser", "think", "--default-max-tokens", "300"),
        *("--allowed-media-domains", "Images.example.com,*.cdn.example.com", "::1"),
        *("--allowed-local-media-path", str(tmp_path), "--limit-mm-per-prompt", '{"image": 4, "video": 0}'),
        *("--host", "0.0.0.0", "--port", "9001", "--metrics-url", "http://h:1/metrics", "--convert", "embed"),
        *("--response-store", str(tmp_path / "responses.db")),
        *("--batch-dir", str(tmp_path / "batches"), "--batch-dir-size", "2G", "--batch-concurrency", "5"),
    )
    assert found.convert == "embed"
    assert found.response_store == tmp_path / "responses.db"
    assert (found.batch_dir, found.max_batch_bytes) == (tmp_path / "batches", 2 << 30)
    assert found.served_model_names == ("code", "gpt-4o") and found.max_body_bytes == 2 << 20
    assert found.default_max_tokens == 300 and found.max_pictures == 4
    assert found.allowed_media_domains == ("images.example.com", "*.cdn.example.com", "::1")
    arguments = to_arguments(found)
    assert "secret" not in " ".join(arguments)
    assert read(*arguments, environment={API_KEYS_VARIABLE: " ".join(found.api_keys)}) == found


def test_the_flags_take_every_parser() -> None:
    for parser in ("auto", "none", *TOOL_CALL_PARSERS):
        assert read("--tool-call-parser", parser).tool_call_parser == parser
    for parser in ("auto", "none", *REASONING_PARSERS):
        assert read("--reasoning-parser", parser).reasoning_parser == parser


def test_every_flag_is_documented() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    flags = re.findall(r"--[\w-]+(?=[ \n])", parser.format_usage())
    page = (Path(__file__).parents[2] / "docs" / "openai-server.md").read_text(encoding="utf-8")
    assert len(flags) > 9 and [flag for flag in flags if f"`{flag} " not in page] == []


def test_keys_are_read_from_flags_the_environment_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("of-file\n\n  other \n")
    arguments = ("--api-key", "of-flag", "of-file", "--api-key-file", str(file))
    found = read(*arguments, environment={API_KEYS_VARIABLE: "of-environment,second third"})
    assert found.api_keys == ("of-flag", "of-file", "of-environment", "second", "third", "other")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--api-key", ""], "empty key"),
        (["--api-key", "schlüssel"], "printable ASCII"),
        (["--api-key", "correct horse battery"], "space or a comma"),
        (["--api-key", "a,b"], "space or a comma"),
        (["--ssl-keyfile", __file__], "without --ssl-certfile"),
    ],
)
def test_conflicting_options_are_named(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(*arguments)


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    with pytest.raises(ValueError, match="no key in it"):
        read("--api-key-file", str(tmp_path / "keys"))


@pytest.mark.parametrize("line", ["correct horse", "a,b"])
def test_each_line_of_a_key_file_is_one_key(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(f"good\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="space or a comma"):
        read("--api-key-file", str(tmp_path / "keys"))


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--chat-template", "/nowhere/chat.jinja", "No such file"),
        ("--ssl-certfile", "/nowhere/chain.pem", "No such file"),
        ("--allowed-origins", "chat.example", "not an origin"),
        ("--allowed-origins", "https://chat.example/path", "not an origin"),
        ("--allowed-origins", "[1", "not a JSON list"),
        ("--tool-call-parser", "llama9", "llama3_json"),
        ("--served-model-name", "", "expected a name"),
        ("--reasoning-parser", "thinking", "think"),
        ("--default-max-tokens", "0", "1 or more, got '0'"),
        ("--default-max-tokens", "-1", "1 or more, got '-1'"),
        ("--max-body-size", "0", "expected a number of bytes"),
        ("--allowed-media-domains", "https://images.example.com", "not a host"),
        ("--allowed-media-domains", "images.example.com/a", "not a host"),
        ("--allowed-media-domains", "*", "not a host"),
        ("--allowed-media-domains", "", "not a host"),
        ("--allowed-local-media-path", "/nowhere", "expected a folder"),
        ("--limit-mm-per-prompt", "image=x", "image=4"),
        ("--limit-mm-per-prompt", "4", "image=4"),
        ("--limit-mm-per-prompt", "image=-1", "image=4"),
        ("--limit-mm-per-prompt", '{"image": true}', "image=4"),
        ("--limit-mm-per-prompt", '{"image": 4', "image=4"),
        ("--limit-mm-per-prompt", "video=1", "0 for other kinds"),
        ("--max-body-size", "64 apples", "expected a number of bytes"),
        ("--batch-dir", "/proc/batches", "No such file"),
        ("--batch-dir", __file__, "expected a folder, got a file"),
        ("--batch-dir-size", "0", "expected a number of bytes"),
        ("--batch-concurrency", "0", "1 or more, got '0'"),
    ],
)
def test_invalid_values_are_refused_with_the_value(
    flag: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(flag, value)
    message = capsys.readouterr().err
    assert ended.value.code == 2 and said in message and flag in message


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "python -m inflight.openai": lambda flags: openai_command.main(["--engine-endpoint", "/none", *flags]),
    "scripts/serve": cli.main,
}


def refusal(command: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a command that exits with status 2 before it starts a server."""
    try:
        status: object = COMMANDS[command](flags)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{% for message in messages %}\n{{ message.content }\n", ", line 2: unexpected '}'"),
        (b"{{ messages }}\n\n{% generation %}x", ", line 3: Unexpected end of template"),
        (b"{{ messages | shouted }}", ", line 1: No filter named 'shouted'"),
        (b"{{ " + b"(" * 2000 + b"messages" + b")" * 2000 + b" }}", ": maximum recursion depth exceeded"),
        (b" \n", ": it is empty"),
        (b"{{ messages }}\xff", ": 'utf-8' codec can't decode byte 0xff"),
        (b"# How to use this model", ": not a chat template, because it does not use the variable messages"),
    ],
)
def test_a_broken_template_is_reported_with_file_and_line(
    command: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(content)
    message = refusal(command, ["--chat-template", str(file)], capsys)
    assert f"argument --chat-template: {file}{said}" in message


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unreadable_template_is_reported(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(command, ["--chat-template", str(tmp_path)], capsys)
    assert f"argument --chat-template: {tmp_path}: Is a directory" in message


def test_a_template_may_use_tags_of_the_chat_environment(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(
        "{% for message in messages %}{% generation %}{{ message }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert read("--chat-template", str(file)).chat_template == file


@pytest.mark.parametrize("command", COMMANDS)
def test_an_invalid_certificate_is_reported(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    _, locked = make_certificate(tmp_path, "locked", "open sesame")
    (tmp_path / "text.pem").write_text("no certificate")
    for files, said in (
        (["--ssl-certfile", str(tmp_path / "text.pem")], "cannot be used for TLS"),
        (["--ssl-certfile", str(certificate)], "cannot be used for TLS"),
        (["--ssl-certfile", str(certificate), "--ssl-keyfile", str(other)], "key values mismatch"),
        (["--ssl-certfile", str(certificate), "--ssl-keyfile", str(locked)], "the key is encrypted"),
    ):
        message = refusal(command, files, capsys)
        assert said in message and all(word in message for word in files)
    assert read("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)).tls_key == key


@pytest.mark.parametrize("command", COMMANDS)
def test_a_binary_key_file_is_reported(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"sk-1\n\xff\xfe\n")
    assert f"--api-key-file {file}: it cannot be read" in refusal(
        command, ["--api-key-file", str(file)], capsys
    )


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("*", ("*",)),
        ("https://a.example, http://b:80", ("https://a.example", "http://b:80")),
        ('["*"]', ("*",)),
    ],
)
def test_origins_may_be_json_or_separated_by_commas(text: str, origins: tuple[str, ...]) -> None:
    assert read("--allowed-origins", text).cors_origins == origins
