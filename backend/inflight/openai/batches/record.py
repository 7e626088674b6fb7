"""The state of one batch, as it is kept on disk and shown to clients."""

from __future__ import annotations

import time

import msgspec

FINAL_STATUSES = frozenset({"failed", "completed", "cancelled"})
_SHOWN_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class BatchProblem(msgspec.Struct, frozen=True):
    """OpenAI's object for a reason why a batch has failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(msgspec.Struct):
    """A batch, with the ids of its files.

    Attributes:
        owner: Digest of the API key that it belongs to, in hexadecimal; "": the server has no keys.
        id, endpoint, input_file_id, completion_window, metadata, created_at: As in OpenAI's batch object.
        output_id, error_id: Ids of the files of its answers, which become visible at its end.
        status: OpenAI's name of its status.
        times: Time of each change of the status in seconds since 1970, by the new status.
        total, completed, failed: Number of its requests, and of those with each kind of answer.
        problems: Reasons for the status `failed`.
        has_output, has_errors: Whether the files of answers are visible.
    """

    owner: str
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    created_at: int
    output_id: str
    error_id: str
    status: str = "validating"
    times: dict[str, int] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    problems: list[BatchProblem] = []
    has_output: bool = False
    has_errors: bool = False

    @property
    def is_final(self) -> bool:
        """Return whether the batch has ended."""
        return self.status in FINAL_STATUSES

    def set_status(self, status: str) -> None:
        """Set the status, and record the time of the change."""
        self.status = status
        self.times[status] = int(time.time())

    def as_json(self) -> dict[str, object]:
        """Return the state in the form of OpenAI's batch object."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.problems} if self.problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": None,
            **{f"{status}_at": self.times.get(status) for status in _SHOWN_TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }
