"""A server, a Triton model and a loaded model that use the fake engine, for tests and benchmarks.

In the server's model repository, `tensorrt_llm` is this module's TritonPythonModel. Its parameter
`fake_engine` configures the fake engine, for example vocab=1000,step_us=200. Needs no checkpoint and no
torch.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.config import Parameters
from inflight.core.schedule.batch import EngineLimits
from inflight.errors import ConfigError
from inflight.load_model import LoadedModel
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.repository import default_repository
from inflight.testing.fake_engine import FakeEngine
from inflight.triton.models import engine

if TYPE_CHECKING:
    from inflight.ranks.rank_context import RankContext

PARAMETER = "fake_engine"
_MODEL = 'from inflight.testing.fake_server import TritonPythonModel\n\n__all__ = ["TritonPythonModel"]\n'
_log = logging.getLogger(__name__)


def load_fake(parameters: Parameters, version_dir: str, rank_context: RankContext | None) -> LoadedModel:
    """Load a fake engine, instead of `inflight.load_model.load_model`. Every rank computes the same tokens.

    The last part of `gpt_model_path` has the form vocab=N,step_us=N: the number of token ids and the
    duration of a forward pass in microseconds. Raises ConfigError if it has another form.
    """
    config = parameters.engine
    vocab_size, step_us = _parse(Path(config.gpt_model_path or "").name)
    max_sequence_length = config.max_sequence_length or 4096
    num_tokens = config.max_tokens_in_paged_kv_cache or config.max_num_sequences * max_sequence_length
    limits = EngineLimits(
        vocab_size,
        max_sequence_length,
        config.max_num_sequences,
        max(1, num_tokens // config.tokens_per_block),
        config.tokens_per_block,
        parameters.pipeline_parallel_size,
    )
    _log.warning("this is a fake engine: tokens are made up, no model is loaded")
    return LoadedModel(FakeEngine(limits, step_us * 1e-6, attend_to_all=False), "", "none", ())


def _parse(name: str) -> tuple[int, int]:
    values = {"vocab": 1000, "step_us": 0}
    for part in filter(None, name.split(",")):
        key, _, value = part.partition("=")
        if key.strip() not in values or not value.strip().isdigit():
            raise ConfigError(f"{PARAMETER}: got {name!r}, expected vocab=N,step_us=N")
        values[key.strip()] = int(value)
    return values["vocab"], values["step_us"]


class TritonPythonModel(engine.TritonPythonModel):
    """`tensorrt_llm` with a fake engine in the model's process."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Initialize the model with the parameter `fake_engine` instead of a checkpoint."""
        config = json.loads(args["model_config"])
        config["parameters"]["gpt_model_path"] = config["parameters"].pop(PARAMETER)
        super().initialize({**args, "model_config": json.dumps(config)})

    def import_engine(self) -> None:
        """Do nothing: the fake engine needs no torch."""

    def load_model(
        self, parameters: Parameters, version_dir: str, rank_context: RankContext | None
    ) -> LoadedModel:
        """Load the fake engine that the parameter `fake_engine` describes, in place of a checkpoint.

        Args:
            parameters: The model's parameters, with the text of `fake_engine` as `gpt_model_path`.
            version_dir: Not used, because no file is read.
            rank_context: Not used, because every rank computes the same tokens.

        Raises:
            ConfigError: The text has another form than vocab=N,step_us=N.
        """
        return load_fake(parameters, version_dir, rank_context)


def make_fake_repository(folder: Path) -> Path:
    """Copy the models of the default repository to `folder`, with a fake engine in `tensorrt_llm`; return it."""
    shutil.copytree(
        default_repository(),
        folder,
        ignore=shutil.ignore_patterns("demo_model", "__pycache__"),
        dirs_exist_ok=True,
    )
    model = folder / "tensorrt_llm"
    with (model / "config.pbtxt").open("a", encoding="utf-8") as config:
        config.write(f'parameters {{ key: "{PARAMETER}" value {{ string_value: "${{{PARAMETER}}}" }} }}\n')
    (model / "1" / "model.py").write_text(_MODEL, encoding="utf-8")
    # All models use the demo model's tokenizer.
    (model / "1" / "demo_model").symlink_to(default_repository() / "tensorrt_llm" / "1" / "demo_model")
    return folder


@contextmanager
def serve_fake(settings: Mapping[str, str], options: ServerOptions | None = None) -> Generator[TritonServer]:
    """Serve with a fake engine, like `inflight.server.launch.serve`. `settings` may include `fake_engine`."""
    with (
        tempfile.TemporaryDirectory(prefix="inflight-fake-") as folder,
        serve(make_fake_repository(Path(folder)), settings=settings, options=options) as server,
    ):
        yield server
