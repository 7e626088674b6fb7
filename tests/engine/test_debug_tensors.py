"""Debug tensors: the packed rows of each iteration, in files or in memory."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from inflight.build import build_engine
from inflight.config import DEBUG_INPUTS, DEBUG_OUTPUTS, EngineConfig, Parameters
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.debug_tensors import DebugTensors
from inflight.engine.load import make_engine
from inflight.engine.runner import ModelRunner
from inflight.errors import ConfigError
from tests.engine.driver import Driver, load_engine
from tests.engine.paging import load_paged
from tests.engine.ranks import ranks
from tests.engine.serving import config_of, serve
from tests.engine.tape import Tape
from tests.models.zoo import Zoo
from tests.models.zoo_configs import VOCAB_SIZE

ALL = (*DEBUG_INPUTS, *DEBUG_OUTPUTS)


def test_the_tensors_of_an_iteration_are_those_of_its_packed_rows(zoo: Zoo) -> None:
    """The batch has a chunk and two sequences in generation, of which the longer is first."""
    model = zoo["llama-gqa"]
    engine = load_engine(model.folder, debug_tensor_names=ALL, debug_tensors_max_iterations=5)
    penalty = SamplingConfig(repetition_penalty=1.5)  # changes logits in place afterwards
    driver = Driver(engine)
    short, long, new = (driver.start(model.prompt(n, n), penalty) for n in (5, 9, 12))
    driver.step({short: 5, long: 9})
    fed = long.generated[-1], short.generated[-1]
    driver.step({new: 12}, generation=[short, long])
    first, second = engine.runner.debug_tensors.latest()
    assert (first.iter, second.iter) == (0, 1)
    assert first.debug_tensors["sequence_length"].tolist() == [5, 9]
    found = second.debug_tensors
    assert set(found) == set(ALL)
    assert found["input_ids"].tolist() == [*model.prompt(12, 12), *fed]
    assert found["positions"].tolist() == [*range(12), 9, 5]
    assert found["sequence_length"].tolist() == [12, 10, 6]
    assert {found[name].dtype for name in DEBUG_INPUTS} == {np.dtype(np.int32)}
    expected = [model.logits(row.tokens[:length])[-1] for row, length in ((new, 12), (long, 10), (short, 6))]
    torch.testing.assert_close(torch.tensor(found["logits"]), torch.stack(expected), rtol=0, atol=1e-3)


def test_the_last_iterations_are_kept_and_returned_once(zoo: Zoo) -> None:
    engine = load_engine(
        zoo["gpt2"].folder, debug_tensor_names=("sequence_length",), debug_tensors_max_iterations=2
    )
    driver = Driver(engine)
    row = driver.start(zoo["gpt2"].prompt(4))
    driver.generate(row, 5)
    kept = engine.runner.debug_tensors.latest()
    assert [(each.iter, each.debug_tensors["sequence_length"].tolist()) for each in kept] == [
        (3, [7]),
        (4, [8]),
    ]
    assert engine.runner.debug_tensors.latest() == []


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"debug_input_tensors": True}, set(DEBUG_INPUTS)),
        ({"debug_output_tensors": True}, set(DEBUG_OUTPUTS)),
        ({"debug_output_tensors": True, "debug_tensor_names": ("positions",)}, {"positions", "logits"}),
    ],
)
def test_files_have_the_tensors_of_every_iteration(zoo: Zoo, tmp_path: Path, config, names) -> None:
    model = zoo["gpt2"]
    engine = load_engine(model.folder, debug_tensors_dir=str(tmp_path), **config)
    driver = Driver(engine)
    driver.generate(driver.start(model.prompt(6)), 3)
    folder = tmp_path / "PP_1" / "TP_1"
    assert {each.name for each in folder.iterdir()} == {f"iteration_{n}" for n in range(3)}
    for number in range(3):
        files = {each.name for each in (folder / f"iteration_{number}").iterdir()}
        assert files == {f"{name}.npy" for name in names}
    if "positions" in names:
        assert np.load(folder / "iteration_0" / "positions.npy").tolist() == [0, 1, 2, 3, 4, 5]
        assert np.load(folder / "iteration_2" / "positions.npy").tolist() == [7]
    if "logits" in names:
        assert np.load(folder / "iteration_2" / "logits.npy").shape == (1, VOCAB_SIZE)
    assert engine.runner.debug_tensors.latest() == []


def test_every_rank_writes_its_own_debug_tensors(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo["gpt2"]
    with ranks(model.folder, (2, 2), debug_tensor_names=ALL, debug_tensors_dir=str(tmp_path)) as engine:
        served = serve(engine, config_of("no-evict"), [Request(1, model.prompt(6), 2)])
    assert served.tokens(1) == model.greedy(model.prompt(6), 2)
    for stage in (1, 2):
        for rank in (1, 2):
            folder = tmp_path / f"PP_{stage}" / f"TP_{rank}" / "iteration_0"
            names = {each.stem for each in folder.iterdir()}
            assert names == set(ALL if stage == 2 else DEBUG_INPUTS)
            assert np.load(folder / "input_ids.npy").tolist() == list(model.prompt(6))


def test_an_engine_without_the_parameters_has_no_debug_tensors(zoo: Zoo) -> None:
    engine = load_engine(zoo["gpt2"].folder)
    assert engine.runner.debug_tensors is None


def test_a_disk_that_cannot_be_written_ends_the_files_and_no_request(
    zoo: Zoo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = zoo["gpt2"]
    (tmp_path / "PP_1").write_text("no folder")
    engine = load_engine(model.folder, debug_tensor_names=ALL, debug_tensors_dir=str(tmp_path))
    driver = Driver(engine)
    assert driver.generate(driver.start(model.prompt(6)), 4) == model.greedy(model.prompt(6), 4)
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert line.startswith("debug tensors are not written any more:")


@pytest.mark.parametrize("planted", ["root", "rank", "file"])
def test_a_planted_link_is_not_followed(
    zoo: Zoo, tmp_path: Path, caplog: pytest.LogCaptureFixture, planted: str
) -> None:
    root, elsewhere = tmp_path / "debug", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    kept = elsewhere / "kept.npy"
    kept.write_text("somebody's")
    if planted == "root":
        root.symlink_to(elsewhere)
    elif planted == "rank":
        root.mkdir(mode=0o700)
        (root / "PP_1").symlink_to(elsewhere)
    else:
        folder = root / "PP_1" / "TP_1" / "iteration_0"
        folder.mkdir(parents=True, mode=0o700)
        (folder / "positions.npy").symlink_to(kept)
    engine = load_engine(zoo["gpt2"].folder, debug_tensor_names=("positions",), debug_tensors_dir=str(root))
    driver = Driver(engine)
    driver.generate(driver.start(zoo["gpt2"].prompt(6)), 2)
    assert [each.name for each in elsewhere.iterdir()] == ["kept.npy"]
    assert kept.read_text() == "somebody's"
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert f"debug_tensors_dir {root}" in line


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_to_gets_no_files(
    zoo: Zoo, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    root = tmp_path / "debug"
    root.mkdir()
    root.chmod(mode)
    engine = load_engine(zoo["gpt2"].folder, debug_tensor_names=("positions",), debug_tensors_dir=str(root))
    driver = Driver(engine)
    driver.generate(driver.start(zoo["gpt2"].prompt(6)), 2)
    assert list(root.iterdir()) == []
    assert "it belongs to another user or is writable by others" in caplog.text


def test_only_this_user_reads_the_files(zoo: Zoo, tmp_path: Path) -> None:
    root = tmp_path / "new" / "debug"
    engine = load_engine(zoo["gpt2"].folder, debug_tensor_names=("positions",), debug_tensors_dir=str(root))
    driver = Driver(engine)
    driver.generate(driver.start(zoo["gpt2"].prompt(6)), 2)
    made = [root, *root.rglob("*")]
    assert len(made) > 3 and not any(each.stat().st_mode & 0o077 for each in made)


def test_an_unknown_name_is_refused_with_the_known_ones(zoo: Zoo) -> None:
    known = "input_ids, positions, sequence_length, logits"
    with pytest.raises(ConfigError, match=rf"debug_tensor_names is \('weights',\), expected any of {known}"):
        load_engine(zoo["gpt2"].folder, debug_tensor_names=("weights",))


def test_iterations_with_debug_tensors_are_not_recorded(zoo: Zoo, tmp_path: Path) -> None:
    """A replayed iteration would not fill the debug tensors."""
    model, tape = zoo["llama-gqa"], Tape()
    plain = load_paged(model.folder, 60).runner
    kept = DebugTensors(frozenset(ALL), 9, tmp_path)
    runner = ModelRunner(plain.decoder, plain.cache, plain.limits, 512, capture=tape, debug_tensors=kept)
    serve(make_engine(runner), config_of("no-evict"), [Request(1, model.prompt(6), 4)])
    assert not tape.replayed
    assert len(kept.latest()) == 4


def test_a_program_with_the_engine_reads_debug_tensors(zoo: Zoo, tmp_path: Path) -> None:
    model = zoo["gpt2"]
    config = EngineConfig(
        str(model.folder),
        max_num_sequences=2,
        device="cpu",
        max_tokens_in_paged_kv_cache=256,
        debug_tensor_names=("sequence_length",),
        debug_tensors_max_iterations=8,
    )
    engine = build_engine(Parameters(engine=config), "", str(tmp_path / "socket"))
    done = threading.Event()
    try:
        engine.client.submit(
            Request(0, model.prompt(5), 3), lambda response: done.set() if response.is_final else None
        )
        assert done.wait(60)
        kept = engine.latest_debug_tensors()
        assert [each.debug_tensors["sequence_length"].tolist() for each in kept] == [[5], [6], [7]]
        assert engine.latest_debug_tensors() == []
    finally:
        engine.close()
