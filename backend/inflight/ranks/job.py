"""Messages between processes: the job of an engine's ranks, and rank 0's report. Pure."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import msgspec

from inflight.config import Parameters
from inflight.endpoint.frames import EngineProcesses
from inflight.errors import ConfigError
from inflight.file_names import readable


class Job(msgspec.Struct, frozen=True):
    """The model to serve. Paths are absolute and equal on all hosts.

    Attributes:
        parameters: The parameters in config.pbtxt.
        version_dir: The Triton model's version folder.
        endpoint_path: The engine's socket, on rank 0's host.
    """

    parameters: Parameters
    version_dir: str
    endpoint_path: str

    @classmethod
    def of(cls, parameters: Parameters, version_dir: str, endpoint_path: str) -> Job:
        """Return the job, with paths that are valid in every process."""
        engine = replace(
            parameters.engine,
            gpt_model_path=_absolute(parameters.engine.gpt_model_path),
            engine_dir=_absolute(parameters.engine.engine_dir),
        )
        parameters = replace(
            parameters,
            engine=engine,
            tokenizer_dir=_absolute(parameters.tokenizer_dir),
            record_path=_absolute(parameters.record_path),
        )
        return cls(parameters, readable(version_dir), readable(str(Path(endpoint_path).absolute())))

    def digest(self) -> str:
        """Return a digest, which is equal for two jobs exactly if the jobs are equal."""
        return blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()


def _absolute(path: str | None) -> str | None:
    return readable(str(Path(path).absolute())) if path else path


class Orders(msgspec.Struct, frozen=True):
    """An orchestrator's orders to rank 0, on one line.

    Attributes:
        job: The job of all ranks.
        server: The tritonserver for which the engine works, a `ProcessId` as text.
        awaits_successor: Whether another process will take over the engine.
        processes: The engine's processes, for a process that supervises the engine later.
    """

    job: Job
    server: str
    awaits_successor: bool
    processes: EngineProcesses


class Report(msgspec.Struct, frozen=True):
    """Rank 0's report, on one line: an error, or "" if the engine serves."""

    error: str = ""


class Briefing(msgspec.Struct, frozen=True):
    """Rank 0's message to the other ranks: the job, or the reason why there is none."""

    job: Job | None = None
    refusal: str = ""


def encode_line(message: Orders | Report) -> bytes:
    """Return the message as a line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def decode_orders(line: bytes) -> Orders:
    """Parse a line with orders; raises ConfigError if it is something else."""
    try:
        return msgspec.json.decode(line, type=Orders)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"rank 0 got no job on its standard input but {line[:80]!r}: {error}") from error


def decode_report(line: bytes) -> Report | None:
    """Parse a report; None if the line is something else."""
    try:
        return msgspec.json.decode(line, type=Report)
    except msgspec.MsgspecError:
        return None
