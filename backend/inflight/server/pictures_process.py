"""The process beside the server that encodes pictures: `python -m inflight.pictures`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from inflight.server.kept_process import KeptProcess
from inflight.server.runtime_directory import PICTURES_SOCKET


class PicturesProcess(KeptProcess):
    """The process that encodes the pictures of prompts with a checkpoint's vision tower.

    Args:
        checkpoint: Folder of the checkpoint.
        dtype: Data type of the tower; None: the checkpoint's.
        flags: The operator's options for pictures of requests (`pictures/options.py`).
        folder: The server's folder.
        echo: Stream for the process's output.

    Attributes:
        socket: Path of the Unix socket at which the process listens.
    """

    def __init__(
        self, checkpoint: Path, dtype: str | None, flags: Sequence[str], folder: Path, echo: TextIO | None
    ) -> None:
        super().__init__("the process that encodes pictures", folder, echo)
        self.socket = folder / PICTURES_SOCKET
        dtypes = () if dtype is None else ("--dtype", dtype)
        self._given = (
            "-m",
            "inflight.pictures",
            str(checkpoint),
            "--socket",
            str(self.socket),
            *dtypes,
            *flags,
        )

    def _arguments(self) -> tuple[str, ...]:
        return self._given
