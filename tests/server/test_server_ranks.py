"""The number of ranks, and who starts them, from the command line and config.pbtxt."""

import json
import shlex
from pathlib import Path

import pytest

from inflight.server import ranks
from inflight.server.checkpoint import check_rank_sizes
from inflight.server.config_text import read_parameters
from inflight.server.errors import OptionError
from inflight.server.launch import ServerOptions, TritonServer
from inflight.server.repository import Wanted, assemble

MODEL = "tensorrt_llm"
PMIX = {"PMIX_RANK": "0"}


def launch(environment: dict[str, str] | None = None, **parameters: str) -> ranks.Launch:
    return ranks.launch_of(MODEL, parameters, environment or {})


def test_one_rank_runs_in_process() -> None:
    assert launch() == ranks.Launch(MODEL, 1, "in_process")
    assert launch(tensor_parallel_size="${tensor_parallel_size}", launch_mode="") == launch()


def test_several_ranks_have_an_orchestrator_by_default() -> None:
    sizes = {"tensor_parallel_size": "2", "pipeline_parallel_size": "3"}
    assert launch(**sizes) == ranks.Launch(MODEL, 6, "orchestrator", tp=2, pp=3)
    assert launch(**sizes, launch_mode="leader").mode == "leader"
    assert launch(launch_mode="orchestrator") == ranks.Launch(MODEL, 1, "orchestrator")


def test_ranks_that_were_started_together_use_leader_mode() -> None:
    together = PMIX | {"OMPI_COMM_WORLD_SIZE": "2"}
    assert launch(together, tensor_parallel_size="2").mode == "leader"
    for wrong in ({}, {"tensor_parallel_size": "3"}, {"launch_mode": "leader"}):
        with pytest.raises(OptionError, match=r"makes [13] ranks, but 2 processes were started together"):
            launch(together, **wrong)


def test_tensorrtllm_backends_variable_selects_the_orchestrator() -> None:
    asked = {"TRTLLM_ORCHESTRATOR": "1"}
    assert launch(asked, tensor_parallel_size="2").mode == "orchestrator"
    assert launch(asked).mode == "orchestrator"
    assert launch(asked, tensor_parallel_size="2", launch_mode="leader").mode == "leader"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1),
        (PMIX | {"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        (PMIX | {"SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 1),
    ],
)
def test_the_number_of_ranks_is_read_from_the_launchers_environment(
    environment: dict[str, str], expected: int
) -> None:
    assert ranks.num_ranks_around(environment) == expected


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"tensor_parallel_size": "2", "launch_mode": "in_process"},
            "--tp 2 --pp 1 .* 2 ranks.*orchestrator",
        ),
        ({"launch_mode": "leader"}, "--mode leader is for several ranks"),
        ({"tensor_parallel_size": "two"}, "tensor_parallel_size is 'two'"),
        ({"pipeline_parallel_size": "0"}, "pipeline_parallel_size is '0'"),
        ({"mpirun_arguments": "--hostfile 'my hosts"}, "mpirun_arguments: got .*: No closing quotation"),
        ({"launch_mode": "follower"}, "launch_mode is 'follower', expected one of in_process, leader"),
    ],
)
def test_conflicting_options_of_ranks_are_refused(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        launch(**parameters)


def test_only_one_engine_can_use_leader_mode() -> None:
    launches = [ranks.Launch("a", 2, "leader"), ranks.Launch("b", 2, "orchestrator")]
    assert ranks.find_leader(launches) == launches[0]
    assert ranks.find_leader(launches[1:]) is None
    with pytest.raises(OptionError, match="a and c have one each"):
        ranks.find_leader([*launches, ranks.Launch("c", 2, "leader")])


def test_options_become_parameters(ranked_repository: Path, tmp_path: Path) -> None:
    wanted = ranks.settings(tp=2, pp=None, mode=None, mpirun_arguments="--hostfile hosts", ep=1)
    runtime = assemble(ranked_repository, tmp_path / "out", Wanted(), wanted)
    written = read_parameters((runtime.path / MODEL / "config.pbtxt").read_text())
    assert written["tensor_parallel_size"] == "2"
    assert written["pipeline_parallel_size"] == ""
    assert written["moe_expert_parallel_size"] == "1"
    assert written["launch_mode"] == "orchestrator"
    assert written["mpirun_arguments"] == "--hostfile hosts"
    assert runtime.launches == (ranks.Launch(MODEL, 2, "orchestrator", "--hostfile hosts", tp=2),)


def test_a_repository_without_options_of_ranks_is_not_changed(
    ranked_repository: Path, tmp_path: Path
) -> None:
    runtime = assemble(ranked_repository, tmp_path / "out", Wanted())
    assert read_parameters((runtime.path / MODEL / "config.pbtxt").read_text())["launch_mode"] == ""


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"tp": 2}, "--tp"), ({"pp": 2}, "--pp"), ({"mode": "orchestrator"}, "--mode")],
)
def test_options_of_ranks_are_refused_for_a_repository_without_their_parameters(
    counting_repository: Path, options: dict, flag: str
) -> None:
    with pytest.raises(OptionError, match=rf"{flag}: no model of .*a repository has the parameter"):
        TritonServer(ServerOptions(counting_repository, **options))


def command(arguments: str = "", variables: dict[str, str] | None = None) -> str:
    words = ranks.leader_command(
        ["triton", "--flag"], variables or {}, Path("/f/pid"), ranks.Launch(MODEL, 3, "leader", arguments)
    )
    return shlex.join(words[1:])


def test_tritonserver_is_rank_0_and_only_it_gets_its_libraries() -> None:
    first, _, others = command(variables={"LD_LIBRARY_PATH": "/l"}).partition(" : ")
    assert "--enable-recovery" in first
    assert " -n 1 " in first
    assert first.endswith("/f/pid LD_LIBRARY_PATH=/l triton --flag")
    assert others.startswith("-n 2 ")
    assert others.endswith(" -m inflight.worker")
    assert "LD_LIBRARY_PATH" not in others


def test_ranks_share_cores_unless_arguments_place_them() -> None:
    assert "--oversubscribe --bind-to none --mca btl tcp" in command("--mca btl tcp")
    placed = command("--map-by core")
    assert "--map-by core" in placed
    assert "oversubscribe" not in placed


def test_mpirun_gets_the_hostfile_without_oversubscribing() -> None:
    over_hosts = command("--hostfile 'my hosts'")
    assert "--bind-to none --hostfile 'my hosts' -n 1" in over_hosts
    assert "oversubscribe" not in over_hosts


# ---------------------------------------------------------------- sizes that divide the model

LLAMA = {"num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}


def checkpoint(folder: Path, **config: int) -> Path:
    (folder / "config.json").write_text(json.dumps({"hidden_size": 48} | config))
    return folder


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 6), (2, 3), (4, 1), (12, 6)])
def test_sizes_that_divide_a_model_are_accepted(tmp_path: Path, tp: int, pp: int) -> None:
    check_rank_sizes(checkpoint(tmp_path, **LLAMA), tp, pp)


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (1, 7, r"--pp 7: every stage needs a layer, and \S+ has 6 layers, so --pp can be 1 to 6"),
        (3, 1, r"--tp 3: .* 12 heads, 4 key heads and an MLP of 96, so --tp can be 1, 2, 4, 12"),
        (24, 2, r"--tp 24: .* so --tp can be 1, 2, 4, 12"),
    ],
)
def test_sizes_that_do_not_divide_a_model_are_refused_with_possible_ones(
    tmp_path: Path, tp: int, pp: int, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        check_rank_sizes(checkpoint(tmp_path, **LLAMA), tp, pp)


MIXTURE = {**LLAMA, "num_experts": 6}


def test_experts_are_divided_among_groups_of_ranks(tmp_path: Path) -> None:
    mixture = checkpoint(tmp_path, **MIXTURE)
    check_rank_sizes(mixture, 4, 2, ep=2)
    with pytest.raises(
        OptionError, match=r"--ep 4: does not divide the 6 experts of .* --tp 4 it can be 1, 2$"
    ):
        check_rank_sizes(mixture, 4, 1, ep=4)
    with pytest.raises(OptionError, match=r"--ep 2: .* has no experts, so --ep can be 1"):
        check_rank_sizes(checkpoint(tmp_path, **LLAMA), 2, 1, ep=2)


def test_expert_groups_divide_the_tensor_parallel_ranks() -> None:
    for tp, ep in ((1, 2), (4, 3)):
        parameters = {"tensor_parallel_size": str(tp), "moe_expert_parallel_size": str(ep)}
        with pytest.raises(OptionError, match=f"a: --ep {ep} is not a divisor of --tp {tp}"):
            ranks.launch_of("a", parameters, {})
    launch = ranks.launch_of("a", {"tensor_parallel_size": "4", "moe_expert_parallel_size": "2"}, {})
    assert (launch.num_ranks, launch.tp, launch.ep) == (4, 4, 2)


def test_gpt2s_config_keys_of_sizes_are_read(tmp_path: Path) -> None:
    gpt2 = checkpoint(tmp_path, hidden_size=None, n_layer=2, n_head=4, n_embd=16)
    check_rank_sizes(gpt2, 4, 2)
    with pytest.raises(OptionError, match="has 2 layers"):
        check_rank_sizes(gpt2, 1, 3)
    with pytest.raises(OptionError, match="4 heads, 4 key heads and an MLP of 64, so --tp can be 1, 2, 4"):
        check_rank_sizes(gpt2, 3, 1)


def test_a_model_without_sizes_in_its_config_is_checked_by_the_engine(tmp_path: Path) -> None:
    check_rank_sizes(checkpoint(tmp_path), 3, 99)
    check_rank_sizes(tmp_path / "nowhere", 3, 99)


def test_the_demo_model_is_checked_before_anything_is_started() -> None:
    for options, message in (
        (ServerOptions(pp=99), "--pp 99: .* so --pp can be 1 to 4"),
        (ServerOptions(tp=3), "--tp 3: .* so --tp can be 1, 2, 4"),
    ):
        with pytest.raises(OptionError, match=message):
            TritonServer(options)
