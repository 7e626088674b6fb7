"""Flags of other servers are translated, or answered with the option of this server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.config import PARAMETERS
from inflight.server import cli
from inflight.server.errors import OptionError
from inflight.server.option_parser import make_parser
from inflight.server.option_types import find_model_behind
from inflight.server.other_servers import DIFFERENT, SAME, SWITCHES, translate
from inflight.server.ports import Ports, resolve_ports
from inflight.server.repository import default_repository

ROOT = Path(__file__).resolve().parents[2]
OWN = set(make_parser()._option_string_actions)
DEMO_MODEL = default_repository() / "tensorrt_llm" / "1" / "demo_model"


def test_flags_with_the_same_meaning_are_translated() -> None:
    options = cli.parse(["--tensor-parallel-size", "2", "--max-num-seqs=4", "--max_seq_len", "512"])
    assert options.tp == 2
    assert options.wanted.settings == {"max_batch_size": "4", "max_sequence_length": "512"}


def test_underscores_and_other_names_of_values_are_understood() -> None:
    options = cli.parse(
        [
            "--tensor_parallel_size",
            "2",
            "--backend",
            "pytorch",
            "--dtype=half",
            "--served_model_name",
            "llama",
        ]
    )
    assert (options.tp, options.wanted.engine, options.wanted.dtype) == (2, "torch", "float16")
    assert options.openai.served_model_names == ("llama",)
    assert cli.parse(["--dtype", "bf16"]).wanted.dtype == "bfloat16"
    assert cli.parse(["--dtype", "auto", "--model-impl", "auto"]).wanted == cli.parse([]).wanted


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("32k", "32000"),
        ("32K", "32768"),
        ("25.6k", "25600"),
        ("1m", "1000000"),
        ("1M", "1048576"),
        ("512", "512"),
    ],
)
@pytest.mark.parametrize(
    ("flag", "key"),
    [("--max-model-len", "max_sequence_length"), ("--max_num_batched_tokens", "max_num_tokens")],
)
def test_sizes_are_written_as_for_vllm(flag: str, key: str, written: str, number: str) -> None:
    assert cli.parse([flag, written]).wanted.settings == {key: number}
    assert translate([f"{flag}={written}"]) == ["--set", f"{key}={number}"]


@pytest.mark.parametrize("written", ["auto", "-1"])
def test_the_models_own_length_may_be_asked_for(written: str) -> None:
    assert cli.parse(["--max-model-len", written]).wanted.settings == {}


@pytest.mark.parametrize("written", ["25.6K", "32 k", "k", "32kk", "thirty"])
def test_what_is_no_size_is_left_for_the_parameters_error(written: str) -> None:
    assert translate(["--max-model-len", written]) == ["--set", f"max_sequence_length={written}"]


def test_values_are_not_changed() -> None:
    given = [
        "--mpirun-arguments",
        "--host $(POD_NAME):8,b_c",
        "--mpirun-arguments=--host a_b",
        "--set=a_b=c_d",
    ]
    assert translate(given) == given


def test_switches_are_understood() -> None:
    options = cli.parse(
        ["--enable-lora", "--enforce-eager", "--enable_chunked_prefill", "--disable-uvicorn-access-log"]
    )
    assert options.wanted.settings == {"cuda_graph_mode": "false", "enable_chunked_context": "true"}
    assert not options.access_log
    with pytest.raises(OptionError, match=r"^--enable-lora=yes: --enable-lora takes no value$"):
        translate(["--enable-lora=yes"])


def test_every_option_that_is_named_exists() -> None:
    switches = [word for words in SWITCHES.values() for word in words]
    text = " ".join([*SAME.values(), *switches, *DIFFERENT.values()])
    parameters = {spec.key for spec in PARAMETERS} | {"max_batch_size", "max_num_tokens"}
    assert set(re.findall(r"--set (\w+)", text)) - {"KEY"} <= parameters
    assert set(re.findall(r"--[a-z-]+", text)) <= OWN


def test_every_flag_of_the_page_is_understood_or_answered() -> None:
    page = (ROOT / "docs" / "from-vllm.md").read_text().split("## Flags")[1].split("## Requests")[0]
    rows = re.findall(r"^\| (`-.*?) \|", page, re.MULTILINE)
    theirs = set(re.findall(r"--[a-z-]+", " ".join(rows)))
    assert len(theirs) > 40
    assert theirs <= OWN | {*SAME, *SWITCHES, *DIFFERENT}


@pytest.mark.parametrize("flag", DIFFERENT)
def test_other_flags_are_answered(flag: str) -> None:
    with pytest.raises(OptionError, match=f"^{flag} is a flag of another server: "):
        translate([flag, "1"])


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--nnodes", "mpirun starts the ranks of all hosts"),
        ("--distributed_timeout_seconds", "--set rank_timeout_ms=N"),
        ("--enable-prompt-embeds", "prompt_embedding_table"),
        ("--cluster_size", "--ep N"),
        ("--fail_fast_on_attention_window_too_large", "too long for the KV cache is refused"),
    ],
)
def test_a_flag_with_no_option_here_says_what_to_do(flag: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        cli.parse([flag, "1"])


def test_a_model_may_be_served_without_its_vision_tower() -> None:
    assert not cli.parse(["--language-model-only", "--enable-tokenizer-info-endpoint"]).vision


def test_all_flags_are_answered_at_once() -> None:
    with pytest.raises(OptionError) as error:
        cli.parse(["--swap_space", "4", "--dtype", "float32", "--enforce-eager", "--seed=1"])
    first, second = str(error.value).splitlines()
    assert (
        first
        == "--swap_space is a flag of another server: not supported: a paused sequence is computed again"
    )
    assert second.startswith("--seed is a flag of another server: set seed in each request")


@pytest.mark.parametrize(
    ("misspelled", "near"),
    [
        ("--max-model-length", "--max-model-len"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--gpu_memory_utilisation", "--gpu-memory-utilization"),
        ("--enable-prefix-cache", "--enable-prefix-caching"),
        ("--prt", "--port"),
    ],
)
def test_the_nearest_flag_may_be_another_servers(
    misspelled: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse([misspelled, "1"])
    assert f"(did you mean {near}?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--backend", "onnx"], "argument --backend (here --engine): got 'onnx'; choose from torch"),
        (["--model-impl=onnx"], "argument --model-impl (here --engine): got 'onnx'"),
        (["--tp_size", "x"], "argument --tp_size (here --tp): expected a whole number from 1, got 'x'"),
        (["--engine", "onnx"], "argument --engine: got 'onnx'"),
    ],
)
def test_an_error_names_the_flag_that_was_written(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(given)
    assert said in capsys.readouterr().err


def test_no_flag_of_this_server_is_in_the_tables() -> None:
    assert not OWN & {*SAME, *SWITCHES, *DIFFERENT}


@pytest.mark.parametrize("before", [[], ["--dtype", "float32"]])
def test_the_model_may_be_given_without_a_flag(before: list[str]) -> None:
    assert cli.parse([*before, str(DEMO_MODEL), "--port", "8123"]).wanted.model == DEMO_MODEL


def test_a_model_given_twice_is_refused() -> None:
    with pytest.raises(OptionError, match="use only one"):
        cli.parse([str(DEMO_MODEL), "--model", str(DEMO_MODEL)])


@pytest.mark.parametrize("flag", ["--served-model-name", "--api-key"])
def test_the_model_may_follow_a_flag_with_several_values(flag: str) -> None:
    options = cli.parse([flag, "foo", "bar", str(DEMO_MODEL)])
    assert options.wanted.model == DEMO_MODEL
    assert ("foo", "bar") in (options.openai.served_model_names, options.openai.api_keys)


def test_a_name_of_the_hub_may_follow_the_served_names() -> None:
    given = make_parser().parse_args(["--served-model-name", "foo", "Qwen/Qwen3-0.6B"])
    find_model_behind(given, "served_model_name", "api_key")
    assert (given.positional_model, given.served_model_name) == ("Qwen/Qwen3-0.6B", ["foo"])


def test_names_alone_are_for_the_demo_model() -> None:
    options = cli.parse(["--served-model-name", "foo", "bar"])
    assert (options.wanted.model, options.openai.served_model_names) == (None, ("foo", "bar"))
    options = cli.parse(["--model", str(DEMO_MODEL), "--served-model-name", "foo", "a/bar"])
    assert options.openai.served_model_names == ("foo", "a/bar")


def test_a_model_behind_api_keys_is_asked_for_without_showing_them() -> None:
    with pytest.raises(
        OptionError, match=r"^--api-key takes all words that follow it: put the model before it"
    ):
        cli.parse(["--api-key", "secret", "Qwen/Qwen3-0.6B"])


def test_a_port_that_is_given_twice_is_refused_with_both_flags() -> None:
    with pytest.raises(OptionError, match=r"^--grpc-port and --port are both 9500: choose different ports$"):
        resolve_ports("127.0.0.1", Ports(grpc=9500, openai=9500))


def test_a_foreign_address_is_answered_with_host() -> None:
    with pytest.raises(OptionError, match=r"--host 192\.0\.2\.1: this machine has no such address"):
        resolve_ports("192.0.2.1", Ports(http=0))
