"""Runs batches in the process of /v1, at the lowest priority, and goes on with them after a restart.

The state of a batch is on disk: its record, and the files of its answers, to which each answer is appended when it
comes. A batch is sent by as many workers as requests may be in flight, and all batches share this number in turn.
Runs on the event loop; files are checked on other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from inflight.openai.batches.folder import ENTRY_BYTES, BatchFolder, FileRecord, FolderFull, new_file_id
from inflight.openai.batches.lines import (
    BadBatchLine,
    BatchAnswer,
    BatchRequest,
    answer_line,
    read_requests,
    resume_output,
)
from inflight.openai.batches.record import BatchProblem, BatchRecord
from inflight.openai.batches.sending import send_all, send_until_final

_log = logging.getLogger(__name__)

SendOnce = Callable[[bytes, BatchRequest], Awaitable[BatchAnswer]]
"""Sends a request once for the API key with this digest, when the engine can be reached."""


class BatchJobs:
    """The batches of a folder.

    Args:
        folder: The folder.
        send: Function that sends a request.
        concurrency: Number of requests of all batches that are in flight.
    """

    def __init__(self, folder: BatchFolder, send: SendOnce, concurrency: int) -> None:
        self.folder = folder
        self._send_once = send
        self._concurrency = concurrency
        self._permits = asyncio.Semaphore(concurrency)
        records = folder.read_records("batch_", BatchRecord)
        self._batches = {each.id: each for each in sorted(records, key=lambda each: each.created_at)}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancellable: set[str] = set()  # batches whose answers of an earlier process have been read

    def start(self) -> None:
        """Go on with the batches that have not ended. Called once, on the event loop."""
        running = [each for each in self._batches.values() if not each.is_final]
        outputs = (file_id for each in running for file_id in (each.output_id, each.error_id))
        self.folder.begin(len(self._batches), (each for each in outputs if each not in self.folder))
        for batch in running:
            self._run_later(batch)

    async def close(self) -> None:
        """End all requests in flight. Batches that have not ended go on when the folder is used again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.folder.close()

    def create(
        self, source: FileRecord, endpoint: str, completion_window: str, metadata: dict[str, str] | None
    ) -> BatchRecord:
        """Start a batch of the requests in a file, which has the same owner. Raises FolderFull."""
        self.folder.grow(3 * ENTRY_BYTES)  # the batch and its two files
        batch = BatchRecord(
            owner=source.owner,
            id=f"batch_{secrets.token_hex(16)}",
            endpoint=endpoint,
            input_file_id=source.id,
            completion_window=completion_window,
            metadata=metadata,
            created_at=int(time.time()),
            output_id=new_file_id(),
            error_id=new_file_id(),
        )
        try:
            for file_id in (batch.output_id, batch.error_id):
                self.folder.open_to_append(file_id).close()
            self._save(batch)
        except OSError:  # the disk is full
            for file_id in (batch.output_id, batch.error_id):
                self.folder.content(file_id).unlink(missing_ok=True)
            self.folder.shrink(3 * ENTRY_BYTES)
            raise
        self._batches[batch.id] = batch
        self._run_later(batch)
        return batch

    def find(self, owner: str, batch_id: str) -> BatchRecord | None:
        """Return a batch; None if no such id belongs to this owner."""
        found = self._batches.get(batch_id)
        return found if found is not None and found.owner == owner else None

    def list_batches(self, owner: str) -> list[BatchRecord]:
        """Return the batches of an owner, the oldest first."""
        return [each for each in self._batches.values() if each.owner == owner]

    @property
    def num_unfinished(self) -> int:
        """Return the number of batches that have not ended."""
        return len(self._tasks)

    def cancel(self, batch: BatchRecord) -> None:
        """End a batch that has not ended. Its answers so far become visible soon after."""
        if batch.status != "cancelling":
            batch.set_status("cancelling")
            self._save(batch)
            if batch.id in self._cancellable:
                self._tasks[batch.id].cancel()

    def batch_reading(self, file_id: str) -> BatchRecord | None:
        """Return a batch that has not ended and reads this file; None if there is none."""
        reading = (
            each for each in self._batches.values() if each.input_file_id == file_id and not each.is_final
        )
        return next(reading, None)

    def delete_file(self, file_id: str) -> None:
        """Remove a file that no batch reads, and the batches that have no file left."""
        self.folder.delete(file_id)
        for batch in list(self._batches.values()):
            ids = (batch.input_file_id, batch.output_id, batch.error_id)
            if file_id in ids and batch.is_final and not any(each in self.folder for each in ids):
                del self._batches[batch.id]
                self.folder.drop_record(batch.id)
                self.folder.shrink(ENTRY_BYTES)

    def _save(self, batch: BatchRecord) -> None:
        self.folder.write_record(batch.id, batch)

    def _run_later(self, batch: BatchRecord) -> None:
        self._tasks[batch.id] = asyncio.create_task(self._run(batch), name=batch.id)

    async def _run(self, batch: BatchRecord) -> None:
        """Run a batch to its end. If the process ends before, the batch goes on at the next start."""
        try:
            answered = await asyncio.to_thread(self._resume, batch)
            self._cancellable.add(batch.id)
            if batch.status != "cancelling":
                await self._answer_all(batch, answered)
            self._end(batch, "cancelled" if batch.status == "cancelling" else "completed")
        except asyncio.CancelledError:
            if batch.status != "cancelling" or batch.id not in self._cancellable:
                raise
            self._end(batch, "cancelled")
        except BadBatchLine as error:
            self._fail(batch, BatchProblem(error.error_code, str(error), error.line, error.field))
        except FolderFull as error:
            self._fail(batch, BatchProblem("storage_full", str(error)))
        except Exception:  # clients must see an end, whatever has failed
            _log.exception("%s failed", batch.id)
            with contextlib.suppress(OSError, BadBatchLine):  # a full disk may have torn the last line
                await asyncio.to_thread(self._resume, batch)
            self._fail(batch, BatchProblem("server_error", "the server failed; its log has the reason"))
        finally:
            self._cancellable.discard(batch.id)
            self._tasks.pop(batch.id, None)

    def _resume(self, batch: BatchRecord) -> set[str]:
        """Return the custom_ids with an answer, after removing a line that a kill has torn. Runs on a thread."""
        succeeded = resume_output(self.folder.content(batch.output_id))
        failed = resume_output(self.folder.content(batch.error_id))
        batch.completed, batch.failed = len(succeeded), len(failed)
        return {*succeeded, *failed}

    async def _answer_all(self, batch: BatchRecord, answered: set[str]) -> None:
        """Check the requests, and send those that are not answered yet."""
        source, folder = self.folder.content(batch.input_file_id), self.folder
        if batch.status == "validating":

            def count() -> int:
                with source.open("rb") as file:
                    return sum(1 for _ in read_requests(file, batch.endpoint))

            batch.total = await asyncio.to_thread(count)
            batch.set_status("in_progress")
            self._save(batch)
        with (
            source.open("rb") as file,
            folder.open_to_append(batch.output_id) as output,
            folder.open_to_append(batch.error_id) as errors,
        ):

            def keep(request: BatchRequest, answer: BatchAnswer) -> None:
                line = answer_line(request.custom_id, answer)
                folder.grow(len(line))
                to = output if answer.is_success else errors
                to.write(line)
                to.flush()
                batch.completed += answer.is_success
                batch.failed += not answer.is_success

            left = (each for each in read_requests(file, batch.endpoint) if each.custom_id not in answered)
            await send_all(left, lambda request: self._send(batch, request), keep, self._concurrency)
        batch.set_status("finalizing")
        self._save(batch)

    async def _send(self, batch: BatchRecord, request: BatchRequest) -> BatchAnswer:
        """Return the final answer to a request, which waits for its turn among those of all batches."""

        async def send_once(request: BatchRequest) -> BatchAnswer:
            return await self._send_once(bytes.fromhex(batch.owner), request)

        async with self._permits:
            return await send_until_final(request, send_once)

    def _fail(self, batch: BatchRecord, problem: BatchProblem) -> None:
        batch.problems.append(problem)
        self._end(batch, "failed")

    def _end(self, batch: BatchRecord, status: str) -> None:
        """Make the files of answers visible that are not empty, then change the status.

        If the disk is full or the files are gone, only this process knows that the batch has ended.
        """
        try:
            batch.has_output = self._publish(batch, batch.output_id, "output")
            batch.has_errors = self._publish(batch, batch.error_id, "error")
            batch.set_status(status)
            self._save(batch)
        except OSError as error:
            _log.exception("the end of %s cannot be kept", batch.id)
            message = f"the server cannot write the batch's files: {error.strerror}"
            batch.problems.append(BatchProblem("server_error", message))
            batch.set_status("failed")

    def _publish(self, batch: BatchRecord, file_id: str, kind: str) -> bool:
        if file_id in self.folder:  # a former process has made it visible
            return True
        path = self.folder.content(file_id)
        if not path.stat().st_size:
            self.folder.drop_unpublished(file_id)
            return False
        self.folder.publish(file_id, batch.owner, f"{batch.id}_{kind}.jsonl", "batch_output")
        return True
