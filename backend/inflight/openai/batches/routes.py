"""/v1/files and /v1/batches: files of requests, and the batches that answer them. Runs on the event loop."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Request
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from inflight.openai.batches.folder import ENTRY_BYTES, FileRecord, FolderFull, copy_content, new_file_id
from inflight.openai.batches.jobs import BatchJobs
from inflight.openai.batches.lines import URLS
from inflight.openai.batches.record import BatchRecord
from inflight.openai.bodies import body_as
from inflight.openai.context import refuse_other_sites
from inflight.openai.errors import ApiError, invalid
from inflight.openai.listing import is_ascending, page_of
from inflight.openai.protocol import BatchBody
from inflight.openai.request_ids import passage_of
from inflight.openai.streaming import JsonAnswer

router = APIRouter()
"""The routes of a server with a folder."""
refusing_router = APIRouter()
"""The same routes of a server without one."""
_MAX_UNFINISHED = 64
"""Largest number of batches that have not ended, because each has open files."""
_MAX_FILES_LISTED = 10_000
_MAX_BATCHES_LISTED, _BATCHES_LISTED = 100, 20
_MAX_NAME = 255


@router.post("/v1/files")
async def create_file(request: Request) -> Response:
    """Keep an uploaded file of requests."""
    jobs = _jobs(request)
    refuse_other_sites(request)
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        raise ApiError("an upload needs the header Content-Length", 411)
    size, file_id = int(declared[:20]), new_file_id()
    try:
        jobs.folder.grow(ENTRY_BYTES + size)
    except FolderFull as error:
        raise ApiError(str(error), 413) from None
    try:
        async with request.form(max_files=1, max_fields=8) as form:
            upload = _upload_of(form)
            with jobs.folder.open_to_append(file_id) as file:
                await asyncio.to_thread(copy_content, upload.file, file)
            name = (upload.filename or "upload")[:_MAX_NAME]
            record = jobs.folder.publish(file_id, _owner(request), name, "batch")
    except BaseException as error:
        jobs.folder.content(file_id).unlink(missing_ok=True)
        jobs.folder.shrink(ENTRY_BYTES + size)
        if isinstance(error, HTTPException):  # Starlette's, for an invalid form
            raise ApiError(f"the body is not multipart/form-data: {error.detail}") from None
        raise
    jobs.folder.shrink(size - record.bytes)
    return JsonAnswer(record.as_json())


@router.get("/v1/files")
async def list_files(request: Request) -> Response:
    """Return the files, the newest first unless the query asks for the oldest."""
    query = request.query_params
    files = _jobs(request).folder.list_files(_owner(request))
    if (purpose := query.get("purpose")) is not None:
        files = [each for each in files if each.purpose == purpose]
    if not is_ascending(query):
        files.reverse()
    items = [(each.id, each.as_json()) for each in files]
    return JsonAnswer(page_of(items, query, _MAX_FILES_LISTED, _MAX_FILES_LISTED))


@router.get("/v1/files/{file_id}")
async def get_file(file_id: str, request: Request) -> Response:
    """Return the description of a file."""
    return JsonAnswer(_find_file(request, file_id).as_json())


@router.get("/v1/files/{file_id}/content")
async def get_file_content(file_id: str, request: Request) -> Response:
    """Return the content of a file."""
    _find_file(request, file_id)
    path = _jobs(request).folder.content(file_id)
    if not path.is_file():
        raise ApiError(f"the content of file {file_id!r} has been removed from the server's folder", 404)
    return FileResponse(path, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request) -> Response:
    """Delete a file that no batch reads."""
    jobs = _jobs(request)
    _find_file(request, file_id)
    if (batch := jobs.batch_reading(file_id)) is not None:
        raise ApiError(f"file {file_id!r} is read by {batch.id}, which has not ended: cancel it first", 409)
    jobs.delete_file(file_id)
    return JsonAnswer({"id": file_id, "object": "file", "deleted": True})


@router.post("/v1/batches")
async def create_batch(body: Annotated[BatchBody, body_as(BatchBody)], request: Request) -> Response:
    """Start a batch of the requests in a file."""
    jobs = _jobs(request)
    if body.endpoint not in URLS:
        raise invalid("endpoint", f"endpoint is {body.endpoint[:80]!r}, expected {' or '.join(URLS)}")
    source = jobs.folder.find(_owner(request), body.input_file_id)
    if source is None or source.purpose != "batch":
        message = (
            f"input_file_id is {body.input_file_id[:80]!r}, expected the id of a file with the purpose batch"
        )
        raise invalid("input_file_id", message)
    if jobs.num_unfinished >= _MAX_UNFINISHED:
        raise ApiError(
            f"{jobs.num_unfinished} batches have not ended, and the server runs no more at a time", 429
        )
    try:
        batch = jobs.create(source, body.endpoint, body.completion_window, body.metadata)
    except FolderFull as error:
        raise ApiError(str(error), 413) from None
    return JsonAnswer(batch.as_json())


@router.get("/v1/batches")
async def list_batches(request: Request) -> Response:
    """Return the batches, the newest first."""
    batches = reversed(_jobs(request).list_batches(_owner(request)))
    items = [(each.id, each.as_json()) for each in batches]
    return JsonAnswer(page_of(items, request.query_params, _BATCHES_LISTED, _MAX_BATCHES_LISTED))


@router.get("/v1/batches/{batch_id}")
async def get_batch(batch_id: str, request: Request) -> Response:
    """Return the state of a batch."""
    return JsonAnswer(_find_batch(request, batch_id).as_json())


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """End a batch; the answers so far are kept."""
    batch = _find_batch(request, batch_id)
    if batch.is_final:
        raise ApiError(f"batch {batch_id!r} has ended: its status is {batch.status}", 409)
    _jobs(request).cancel(batch)
    return JsonAnswer(batch.as_json())


async def refuse() -> Response:
    """Answer every request with the way to get a folder."""
    message = (
        "this server keeps no files and runs no batches: start it with --batch-dir DIR, or send the file with "
        "`inflight batch`"
    )
    raise ApiError(message, 501, None, "not_implemented")


for _path in ("/v1/files", "/v1/batches"):
    for _each in (_path, f"{_path}/{{rest:path}}"):
        refusing_router.add_api_route(_each, refuse, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])


def _jobs(request: Request) -> BatchJobs:
    return request.app.state.batches


def _owner(request: Request) -> str:
    return passage_of(request.scope).key.hex()


def _find_file(request: Request, file_id: str) -> FileRecord:
    found = _jobs(request).folder.find(_owner(request), file_id)
    if found is None:
        raise ApiError(f"there is no file {file_id[:100]!r}", 404)
    return found


def _find_batch(request: Request, batch_id: str) -> BatchRecord:
    found = _jobs(request).find(_owner(request), batch_id)
    if found is None:
        raise ApiError(f"there is no batch {batch_id[:100]!r}", 404)
    return found


def _upload_of(form: FormData) -> UploadFile:
    """Return the uploaded file; raise ApiError for a form that is not an upload of a batch's requests."""
    for field in form:
        if field not in ("purpose", "file"):
            message = f"unknown field {field[:100]}: expected purpose and file"
            raise ApiError(message, 400, field[:100], "unknown_parameter")
    if (purpose := form.get("purpose")) != "batch":
        shown = "missing" if purpose is None else repr(str(purpose)[:80])
        raise invalid("purpose", f'purpose is {shown}, expected "batch"')
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise invalid("file", "file is missing: expected a part with a file name")
    return upload
