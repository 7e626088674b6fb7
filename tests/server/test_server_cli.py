"""The command line, up to the start of a process."""

import json
import sys
from pathlib import Path

import pytest

from inflight.openai.options import OpenAiOptions
from inflight.server import cli
from inflight.server.errors import OptionError
from inflight.server.ports import Ports
from inflight.testing.make_model import make_model


def test_options_have_documented_defaults() -> None:
    options = cli.parse([])
    assert options.ports == Ports(8000, 8001, 8002, 9000)
    assert options.openai == OpenAiOptions()
    assert options.host == "127.0.0.1"
    assert options.wanted.model is None
    assert options.wanted.settings == {}
    assert options.model_repository.name == "model_repository"


def test_a_settings_value_is_all_text_after_the_first_equals_sign() -> None:
    options = cli.parse(["--set", "a=b=c", "--set", "empty=", "--set", "a=last"])
    assert options.wanted.settings == {"a": "last", "empty": ""}


def test_adapters_have_a_name_and_a_folder() -> None:
    options = cli.parse(["--lora", "sql=a/b=c", "--lora", "chat=/d"])
    assert options.wanted.adapters == (("sql", Path("a/b=c")), ("chat", Path("/d")))
    assert cli.parse([]).wanted.adapters == ()


def test_an_adapter_may_not_have_the_models_name(tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path / "tiny", shape="tiny")
    for served in (["--model", str(checkpoint)], ["--served-model-name", "tiny", "--model", str(checkpoint)]):
        with pytest.raises(
            OptionError, match="--lora tiny=/d: the model has this name, expected another one"
        ):
            cli.parse([*served, "--lora", "tiny=/d"])
    options = cli.parse(["--model", str(checkpoint), "--served-model-name", "other", "--lora", "tiny=/d"])
    assert options.wanted.adapters == (("tiny", Path("/d")),)


@pytest.mark.parametrize("weights", ["memory", "mmap"])
def test_weights_may_be_in_memory_or_mapped(weights: str) -> None:
    assert cli.parse(["--weights", weights]).wanted.weights == weights


def test_the_method_of_drafting_is_checked_and_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.parse(["--speculate", "suffix:4"]).wanted.speculate == "suffix:4"
    with pytest.raises(SystemExit):
        cli.parse(["--speculate", "ngram"])
    said = capsys.readouterr().err
    assert "--speculate: got 'ngram', expected none, prompt-lookup, suffix, mtp or eagle3" in said
    assert "prompt-lookup:K or suffix:K lets the server draft from earlier tokens" in said


@pytest.mark.parametrize("flag", ["--kv-cache-dir", "--batch-dir"])
def test_an_empty_name_is_not_the_current_folder(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse([flag, ""])
    assert f"argument {flag}: expected the name of a folder, got ''" in capsys.readouterr().err


def test_a_draft_model_implies_eagle3() -> None:
    wanted = cli.parse(["--draft-model", "heads/a"]).wanted
    assert (wanted.draft_model, wanted.speculate) == (Path("heads/a"), "eagle3")
    assert cli.parse(["--draft-model", "heads/a", "--speculate", "eagle3:5"]).wanted.speculate == "eagle3:5"
    with pytest.raises(
        OptionError, match="--speculate eagle3:2 needs --draft-model with the folder of an EAGLE-3"
    ):
        cli.parse(["--speculate", "eagle3:2"])
    with pytest.raises(OptionError, match="--draft-model heads/a is for --speculate eagle3, not mtp"):
        cli.parse(["--draft-model", "heads/a", "--speculate", "mtp"])


def test_a_head_of_gemma_4_implies_mtp(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma4_unified_assistant"}')
    folder = str(tmp_path)
    assert cli.parse(["--draft-model", folder]).wanted.speculate == "mtp:3"
    assert cli.parse(["--draft-model", folder, "--speculate", "mtp:5"]).wanted.speculate == "mtp:5"
    with pytest.raises(OptionError, match=f"--draft-model {folder} is for --speculate mtp, not eagle3:2"):
        cli.parse(["--draft-model", folder, "--speculate", "eagle3:2"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "fp8"])
def test_every_dtype_is_accepted(dtype: str) -> None:
    assert cli.parse(["--dtype", dtype, "--set", "kernels=torch"]).wanted.dtype == dtype


@pytest.mark.parametrize("engine", ["torch", "transformers"])
def test_every_engine_is_accepted(engine: str) -> None:
    assert cli.parse(["--engine", engine]).wanted.engine == engine
    assert cli.parse([]).wanted.engine is None


def test_a_model_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert cli.parse(["--model", "m"]).wanted.model == tmp_path / "m"


def make_plans(folder: Path, num_slots: int = 5) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rank0.json").write_text(json.dumps({"settings": {"max_batch_size": num_slots}}))
    (folder / "config.json").write_text("{}")
    return folder


def test_plans_are_served_with_their_checkpoint_and_without(tmp_path: Path) -> None:
    plans = make_plans(tmp_path / "plans")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    wanted = cli.parse(["--engine", "tensorrt", "--engine-dir", str(plans)]).wanted
    assert (wanted.engine, wanted.engine_dir, wanted.model) == ("tensorrt", plans, None)
    wanted = cli.parse(["--engine-dir", str(plans), "--model", str(tmp_path / "m")]).wanted
    assert (wanted.engine_dir, wanted.model) == (plans, tmp_path / "m")
    assert cli.parse(["--engine", "tensorrt", "--model", str(plans)]).wanted.model == plans


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "tensorrt"], "--engine tensorrt needs --engine-dir"),
        (["--engine-dir", "somewhere"], "--engine-dir somewhere: no plans in that folder"),
        (["--engine", "torch", "--engine-dir", "x"], "--engine-dir x is for --engine tensorrt, not torch"),
    ],
)
def test_missing_or_contradicting_plans_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "build"), [("scripts/serve", "scripts/build"), ("inflight serve", "inflight build")]
)
def test_the_command_that_writes_plans_is_named_as_this_user_types_it(
    program: str, build: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert cli.main(["--engine", "tensorrt"]) == 2
    assert f"a folder that {build} wrote" in capsys.readouterr().err
    assert cli.main(["--engine-dir", "somewhere"]) == 2
    assert f"no plans in that folder; {build} writes them" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "novalue"],
        ["--lora", "/adapters/sql"],
        ["--lora", "sql="],
        ["--lora", "=sql"],
        ["--http-port", "99999"],
        ["--openai-port", "-1"],
        ["--chat-template", "/nowhere/chat.jinja"],
        ["--max-body-size", "much"],
        ["--exit-timeout", "-1"],
        ["--tp", "0"],
        ["--pp", "two"],
        ["--mode", "follower"],
        ["--nonsense"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(arguments)
    assert ended.value.code == 2


def test_options_of_ranks_and_their_launch_are_parsed() -> None:
    options = cli.parse(
        ["--tp", "2", "--pp", "3", "--mode", "leader", "--mpirun-arguments", "--hostfile hosts"]
    )
    assert (options.tp, options.pp, options.mode) == (2, 3, "leader")
    assert options.mpirun_arguments == "--hostfile hosts"


def test_a_single_rank_may_be_given_explicitly() -> None:
    cli.parse(["--tp", "1", "--pp", "1", "--mode", "in_process", "--engine", "torch"])


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no config\.json"):
        cli.parse(["--model", str(tmp_path)])
    with pytest.raises(OptionError, match="not a folder"):
        cli.parse(["--model", str(tmp_path / "missing")])


def test_explicit_model_control_is_an_option() -> None:
    assert cli.parse([]).model_control == "none"
    assert cli.parse(["--model-control", "explicit"]).model_control == "explicit"


def test_the_openai_endpoint_can_be_disabled() -> None:
    assert cli.parse(["--no-openai"]).ports == Ports(8000, 8001, 8002)
    assert cli.parse(["--openai-port", "0"]).ports.openai == 0


def test_flags_of_the_openai_endpoint_are_parsed(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    options = cli.parse(
        ["--chat-template", str(template), "--served-model-name", "code", "--host", "0.0.0.0"]
        + ["--api-key", "k", "--allowed-origins", "*", "--openai-port", "9001"]
    ).openai
    assert options == OpenAiOptions(
        "0.0.0.0", 9001, ("code",), template, api_keys=("k",), cors_origins=("*",)
    )


def test_contradicting_flags_of_the_openai_endpoint_are_refused() -> None:
    with pytest.raises(OptionError, match="without --ssl-certfile"):
        cli.parse(["--ssl-keyfile", __file__])


def test_expert_parallel_groups_are_parsed() -> None:
    options = cli.parse(["--tp", "4", "--ep", "2"])
    assert (options.tp, options.pp, options.ep) == (4, None, 2)


def test_a_server_without_triton_needs_the_command(capsys):
    """`inflight serve` starts one; this module cannot, and must not start a tritonserver instead."""
    assert cli.main(["--no-triton"]) == 2
    assert "--no-triton: `inflight serve` has this option" in capsys.readouterr().err
