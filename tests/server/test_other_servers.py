"""Flags of other servers are translated, or answered with the option of this server."""

from __future__ import annotations

import pytest

from inflight.config import PARAMETERS
from inflight.server import cli
from inflight.server.errors import OptionError
from inflight.server.other_servers import DIFFERENT, SAME, translate
from inflight.server.ports import Ports, resolve_ports
from inflight.server.repository import default_repository

DEMO_MODEL = default_repository() / "tensorrt_llm" / "1" / "demo_model"


def test_flags_with_the_same_meaning_are_translated() -> None:
    options = cli.parse(["--tensor-parallel-size", "2", "--max-num-seqs=4", "--max_seq_len", "512"])
    assert options.tp == 2
    assert options.wanted.settings == {"max_batch_size": "4", "max_sequence_length": "512"}


def test_translations_name_existing_parameters() -> None:
    known = {spec.key for spec in PARAMETERS} | {"max_batch_size"}
    named = {option.partition(" ")[2] for option in SAME.values()} - {""}
    assert named <= known


@pytest.mark.parametrize("flag", DIFFERENT)
def test_other_flags_are_answered(flag: str) -> None:
    with pytest.raises(OptionError, match=f"^{flag} is a flag of another server: "):
        translate([flag, "1"])


def test_no_flag_of_this_server_is_in_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    own = set(capsys.readouterr().out.replace(",", " ").split())
    assert not own & {*SAME} and not own & ({*DIFFERENT} - {"--log-verbose"})


@pytest.mark.parametrize("before", [[], ["--dtype", "float32"]])
def test_the_model_may_be_given_without_a_flag(before: list[str]) -> None:
    assert cli.parse([*before, str(DEMO_MODEL), "--port", "8123"]).wanted.model == DEMO_MODEL


def test_a_model_given_twice_is_refused() -> None:
    with pytest.raises(OptionError, match="use only one"):
        cli.parse([str(DEMO_MODEL), "--model", str(DEMO_MODEL)])


def test_a_foreign_address_is_answered_with_host() -> None:
    with pytest.raises(OptionError, match=r"--host 192\.0\.2\.1: this machine has no such address"):
        resolve_ports("192.0.2.1", Ports(http=0))
