"""Loading a model: compiling kernels meanwhile, and logits post-processors."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from inflight.build import build_engine
from inflight.config import EngineConfig
from inflight.engine.cpu import library
from inflight.errors import ConfigError, Unsupported
from inflight.load_model import _begin_compiling, _check_same_names, _make_grammars, load_model
from inflight.sampling import LogitsPostProcessors
from tests.guided.test_at_random import DEMO_MODEL
from tests.triton.factories import make_parameters

NOTHING: list[tuple[str, bool]] = []
AWQ = json.dumps({"torch_dtype": "float16", "quantization_config": {"quant_method": "awq", "bits": 4}})


@pytest.mark.parametrize(
    ("given", "config", "begun"),
    [
        ({"dtype": "float32"}, "{}", [("float32", False)]),
        ({"dtype": "int8"}, "{}", [("bfloat16", True)]),
        ({}, json.dumps({"torch_dtype": "bfloat16"}), [("bfloat16", False)]),
        ({}, json.dumps({"dtype": "float32"}), [("float32", False)]),
        ({}, AWQ, [("bfloat16", True)]),
        ({}, AWQ.replace("float16", "float32"), [("float32", False)]),
        ({"dtype": "bfloat16"}, AWQ, [("bfloat16", False)]),
        ({}, AWQ.replace("awq", "fp8"), [("float16", False)]),
        ({"kernels": "torch", "dtype": "float32"}, "{}", NOTHING),
        ({}, "{}", NOTHING),
        ({}, "no JSON", NOTHING),
        ({}, "[]", NOTHING),
        ({}, json.dumps({"dtype": 3}), NOTHING),
    ],
)
def test_compiling_starts_for_the_dtype_that_will_be_loaded(
    tmp_path: Path,
    given: dict[str, str],
    config: str,
    begun: list[tuple[str, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("a GPU computes with torch's operators")
    (tmp_path / "config.json").write_text(config)
    found: list[tuple[str, bool]] = []
    monkeypatch.setattr(library, "begin_loading", lambda dtype, int8, _: found.append((dtype, int8)))
    _begin_compiling(make_parameters(**given).engine, str(tmp_path))
    assert found == begun


# ---------------------------------------------------------------------- logits post-processors


MODULE = "PROCESSORS = {'upper': lambda req_id, logits, ids, stream_ptr, client_id: None}"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> list[LogitsPostProcessors]:
    """Replace the engine's load function and record the post-processors it gets."""
    loaded: list[LogitsPostProcessors] = []

    def load(
        config: EngineConfig, processors: LogitsPostProcessors, make_grammars: object, kept: object
    ) -> SimpleNamespace:
        loaded.append(processors)
        return SimpleNamespace(
            dtype="float32",
            eos_token_ids=(),
            limits=SimpleNamespace(vocab_size=100),
            runner=SimpleNamespace(
                debug_tensors=None,
                kernels="torch",
                decoder=None,
                cache=SimpleNamespace(device=torch.device("cpu"), as_bytes=lambda: None),
            ),
        )

    monkeypatch.setattr("inflight.engine.load.load_engine", load)
    return loaded


def test_post_processors_come_from_a_module_or_as_values(
    tmp_path: Path, model: list[LogitsPostProcessors]
) -> None:
    path = tmp_path / "rules.py"
    path.write_text(MODULE)
    given = LogitsPostProcessors({"lower": lambda *five: None})
    load_model(make_parameters(gpt_model_path="x", logits_post_processor_module=str(path)), "", None)
    load_model(make_parameters(gpt_model_path="x"), "", None, given)
    load_model(make_parameters(gpt_model_path="x"), "", None)
    assert [found.names for found in model] == [("upper",), ("lower",), ()]


def test_post_processors_from_a_module_and_as_values_are_refused(
    tmp_path: Path, model: list[LogitsPostProcessors]
) -> None:
    parameters = make_parameters(gpt_model_path="x", logits_post_processor_module="rules")
    with pytest.raises(ConfigError, match="is 'rules', but logits post-processors were also passed"):
        load_model(parameters, "", None, LogitsPostProcessors())
    with pytest.raises(ConfigError, match="is 'rules': importing it raised ModuleNotFoundError"):
        load_model(parameters, "", None)
    assert model == []


def test_an_engine_is_built_with_post_processors(tmp_path: Path, model: list[LogitsPostProcessors]) -> None:
    given = LogitsPostProcessors({"lower": lambda *five: None})
    load = functools.partial(load_model, processors=given)
    with pytest.raises(AttributeError, match="max_num_sequences"):  # the fake engine has no limits
        build_engine(make_parameters(gpt_model_path="x"), "", str(tmp_path / "engine.sock"), load=load)
    assert model == [given]


@pytest.mark.parametrize(("names", "agrees"), [(("a", "b"), True), (("a",), False), (("b", "a"), False)])
def test_all_ranks_have_post_processors_of_the_same_names(names: tuple[str, ...], agrees: bool) -> None:
    """The rank with the higher digest notices the difference, and then both raise."""
    digests: list[int] = []
    noticed = 0
    for mine in (("a", "b"), names):
        _check_same_names(mine, SimpleNamespace(least=lambda digest: digests.append(digest) or digest))
    for mine in (("a", "b"), names):
        try:
            _check_same_names(mine, SimpleNamespace(least=lambda digest: min(digests)))
        except ConfigError as error:
            assert f"this rank has {list(mine)}, and another rank has other names" in str(error)
            noticed += 1
    assert noticed == (0 if agrees else 1)


# ---------------------------------------------------------------------- guides


def test_a_tokenizer_is_read_when_guides_need_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server is ready without it. A broken one only has guides refused, like a missing one."""
    caplog.set_level("INFO")
    assert _make_grammars(make_parameters(), str(tmp_path), None, 300) is None
    assert "tokenizer.json does not exist" in caplog.text
    (tmp_path / "tokenizer.json").write_text("{}")
    grammars = _make_grammars(make_parameters(), str(tmp_path), None, 300)
    assert grammars is not None
    with pytest.raises(Unsupported, match="there is no tokenizer to follow guides with"):
        grammars.library()
    assert "tokenizer.json is not a tokenizer" in caplog.text
    whole = _make_grammars(make_parameters(), str(DEMO_MODEL), None, 300)
    assert whole is not None
    assert len(whole.library().vocabulary.tokens) == 300


def test_a_missing_grammar_library_is_reported_when_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="guided_decoding_backend is llguidance, which is not installed"):
        _make_grammars(make_parameters(), str(DEMO_MODEL), None, 300)


def test_groups_of_experts_need_several_ranks(tmp_path: Path) -> None:
    """A single process would load the whole model without an error."""
    parameters = make_parameters(moe_expert_parallel_size=2)
    with pytest.raises(ConfigError, match=r"moe_expert_parallel_size is 2, expected a divisor of .*, 1"):
        load_model(parameters, str(tmp_path), None)
