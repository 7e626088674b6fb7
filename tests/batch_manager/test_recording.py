"""Traces: records are written and read without loss, and a full disk ends only the recording."""

from __future__ import annotations

import io
import logging
import math
import os
import stat
from dataclasses import replace

import pytest

from inflight.batch_manager.recording import (
    VERSION,
    BadTrace,
    Begin,
    End,
    Header,
    JsonRecorder,
    Load,
    Start,
    Trace,
    decode,
    encode,
    leave_out_logits,
    make_begin,
    zero_logits,
)
from inflight.config import CapacityPolicy, ChunkingPolicy, SchedulePolicy, SchedulingConfig
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.retention import Retention, RetentionConfig, TokenRangeRetention
from inflight.core.request.adapter import (
    AdapterEvent,
    AdapterUpdate,
    LoraRequest,
    LoraWeights,
    Matrix,
    RawBuffer,
    StoredAdapter,
)
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.request import ExternalDraft, FloatTensor, IterationInput, OutputOptions, Request
from inflight.core.request.response import TopLogProbs
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import StopReason, StopSignal
from inflight.core.schedule.batch import (
    BeamGroup,
    BeamMove,
    ContextChunk,
    ContextDetails,
    EngineLimits,
    ModelOutput,
    ScheduledBatch,
    SlotStart,
    TokenDetails,
)
from inflight.errors import ConfigError, InvalidArgument, StepFailed, Unavailable
from inflight.testing.small_inputs import make_table

LIMITS = EngineLimits(
    vocab_size=3,
    max_sequence_length=100,
    max_num_sequences=4,
    num_blocks=64,
    tokens_per_block=4,
    logits_post_processors=("upper", "batched"),
)
CONFIG = SchedulingConfig(
    CapacityPolicy.MAX_UTILIZATION,
    max_num_tokens=64,
    enable_chunked_context=True,
    context_chunking_policy=ChunkingPolicy.EQUAL_PROGRESS,
    schedule_policy=SchedulePolicy.LPM,
)
TENSOR = FloatTensor((3,), bytes(range(250, 256)) + bytes(6))
FULL_REQUEST = Request(
    2**64 - 1,
    (0, 1, 2),
    9,
    streaming=True,
    end_ids=(2,),
    pad_id=-1,
    sampling=SamplingConfig(num_return_sequences=2, temperature=0.1, random_seed=2**64 - 1),
    output=OutputOptions(return_log_probs=True, num_top_log_probs=2),
    stop_words=((1, 2), (0,)),
    bad_words=((2,),),
    embedding_bias=TENSOR,
    draft=ExternalDraft((1,), FloatTensor((1, 3), TENSOR.data), 0.5),
    prompt_lookup_num_tokens=4,
    logits_post_processor_name="upper",
    identity=PrefixIdentity(2**63, (0, 5, 2**63)),
    retention=RetentionConfig((TokenRangeRetention(0, None, Retention(80, 1000)),), Retention(10)),
    priority=1.0,
    client_id=3,
    allotted_time_ms=50,
    arrival_time_ns=12345678901234567,
    lora=LoraRequest(2**64 - 1),
    prompt_table=make_table(b"\x00\xff"),
)
ADAPTER = StoredAdapter(
    3,
    b"\xff" * 16,
    None,
    2,
    LoraWeights(Matrix((1, 6), "bfloat16", RawBuffer(bytes(12))), ((0, 1, 2),)),
)
ADAPTERS = AdapterUpdate((ADAPTER,), (AdapterEvent(5, 3), AdapterEvent(6, -1, "INTERNAL", "gone")), (1, 2))
FULL_BATCH = ScheduledBatch(
    7,
    1,
    released_slots=(3,),
    block_copies=((1, 2),),
    moves=(BeamMove(1, 0, 2),),
    replaced_blocks=((0, 1, 2),),
    new_blocks=((0, (5, 6)),),
    context=(ContextChunk(0, 4, (1, 2), True, 1, True, True), ContextChunk(2, 0, (1,), False)),
    generation_slots=(1, 3),
    beam_groups=(BeamGroup((1, 3), (-0.5, -math.inf), 4),),
)
TOP = TopLogProbs((1, 0), (-0.1, -2.5))
FULL_OUTPUT = ModelOutput(
    7,
    [(1, 2), (), ()],
    [BeamCandidates((0, 1), (1, 2), (-0.7, -math.inf), (-0.1, -3.0), (TOP, TOP), (TENSOR.data, TENSOR.data))],
    {0: TokenDetails((-0.1, 1e-300), (TOP, TOP), (TENSOR.data, TENSOR.data))},
    {0: ContextDetails((0.1,), TENSOR.data)},
)


@pytest.mark.parametrize(
    "record",
    [
        Header(CONFIG, LIMITS, has_logits=True),
        Header(SchedulingConfig(max_beam_width=2), LIMITS),
        Begin(IterationInput(0, 0)),
        Begin(IterationInput(1, 2, (Request(1, (0,), 1), FULL_REQUEST))),
        Begin(IterationInput(1, 2, (), (StopSignal(1), StopSignal(2, StopReason.TIMED_OUT, 1, 99)))),
        Begin(IterationInput(1, 2, adapters=ADAPTERS)),
        Begin(
            IterationInput(1, 2),
            FULL_BATCH,
            (Start(1, 5), Start(2, 2**64 - 1, 1, (4, 5), 8)),
            (Load(3, (8, 1)),),
        ),
        End(7, 2**62, FULL_OUTPUT),
        End(7, 1, None, "INTERNAL", 'a "message"\nof two lines, with null and ümlauts'),
    ],
)
def test_a_record_is_decoded_as_it_was_encoded(record):
    line = encode(record)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode(line) == record


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 0.1, 5e-324])
def test_every_float_is_decoded_exactly(number):
    sampling = SamplingConfig(temperature=number)
    request = Request(1, (0,), 1, sampling=sampling, draft=ExternalDraft((1,), None, number))
    batch = replace(FULL_BATCH, beam_groups=(BeamGroup((0,), (number,), 2),))
    output = replace(
        FULL_OUTPUT,
        beams=[BeamCandidates((0,), (1,), (number,))],
        details={3: TokenDetails((number, -1.0), (TopLogProbs((1,), (number,)),))},
        context={2: ContextDetails((number,))},
    )
    begin, end = (
        decode(encode(Begin(IterationInput(0, 0, (request,)), batch))),
        decode(encode(End(0, 0, output))),
    )
    (back,) = begin.inputs.new_requests
    assert repr(back) == repr(request)
    assert repr(begin.batch) == repr(batch) and repr(end.output) == repr(output)


@pytest.mark.parametrize("score", [-0.5, -math.inf])
def test_errors_of_failed_rows_are_decoded(score):
    """Errors are decoded with and without NaN and infinities, which JSON lacks and which are encoded
    differently."""
    failures = {2: InvalidArgument("no token"), 3: StepFailed("it raised ValueError: null")}
    output = replace(FULL_OUTPUT, beams=[BeamCandidates((0,), (1,), (score,))], failures=failures)
    back = decode(encode(End(7, 1, output))).output
    assert replace(back, failures={}) == replace(output, failures={})
    assert {slot: (type(error), str(error)) for slot, error in back.failures.items()} == {
        2: (InvalidArgument, "no token"),
        3: (StepFailed, "it raised ValueError: null"),
    }


@pytest.mark.parametrize("failure", ['"boom"', '["INTERNAL"]', "[1,2]", "null"])
def test_a_failure_without_code_and_message_is_not_recorded(failure):
    line = b'{"record":"end","iteration":0,"now_ns":1,"output":{"iteration":0,"failures":{"0":%s}}}'
    with pytest.raises(BadTrace, match="not a record of a trace"):
        decode(line % failure.encode())


def test_recorded_starts_have_request_ids_and_the_batch_is_unchanged():
    starts = (SlotStart(0, FULL_REQUEST), SlotStart(2, FULL_REQUEST, 1, (4, 5)))
    record = make_begin(IterationInput(7, 1), replace(FULL_BATCH, starts=starts))
    assert record.batch == FULL_BATCH
    assert record.starts == (Start(0, 2**64 - 1), Start(2, 2**64 - 1, 1, (4, 5)))


def test_omitted_logits_are_decoded_as_zeros_of_the_same_length():
    back = zero_logits(leave_out_logits(FULL_OUTPUT))
    assert back.details[0].logits == (bytes(12), bytes(12)) and back.context[0].logits == bytes(12)
    assert back.beams[0].logits == (bytes(12), bytes(12))
    assert back.details[0].log_probs == FULL_OUTPUT.details[0].log_probs
    plain = ModelOutput(1, [(1,)])
    assert leave_out_logits(plain) is plain


# ---------------------------------------------------------------------- the file


def trace_of(path) -> tuple[Trace, list[Begin | End]]:
    trace = Trace(io.BytesIO(path.read_bytes()))
    return trace, list(trace)


@pytest.mark.parametrize("keep_logits", [False, True])
def test_a_trace_can_be_read_while_it_is_written(tmp_path, keep_logits):
    path = tmp_path / "trace"
    recorder = JsonRecorder(str(path), CONFIG, LIMITS, keep_logits)
    trace, records = trace_of(path)
    assert (trace.header.config, trace.header.limits, records) == (CONFIG, LIMITS, [])
    inputs = IterationInput(7, 1, (FULL_REQUEST,))
    recorder.begin(inputs, FULL_BATCH)
    assert trace_of(path)[1] == [Begin(inputs, FULL_BATCH)]
    recorder.end(FULL_OUTPUT, 5)
    expected = FULL_OUTPUT if keep_logits else zero_logits(leave_out_logits(FULL_OUTPUT))
    assert trace_of(path)[1][1:] == [End(7, 5, expected)]
    recorder.close()
    recorder.close()


def test_each_recorded_outcome_has_the_iteration_of_the_oldest_batch_in_flight(tmp_path):
    recorder = JsonRecorder(str(tmp_path / "trace"), CONFIG, LIMITS)
    for iteration in (3, 4, 6):
        recorder.begin(IterationInput(iteration, 0), ScheduledBatch(iteration, generation_slots=(0,)))
    recorder.begin(IterationInput(5, 0), None)
    recorder.end(StepFailed("broken \udcff"), 1)
    recorder.end(Unavailable("gone"), 2)
    recorder.end(ModelOutput(6, [(1,)]), 3)
    recorder.close()
    _, records = trace_of(tmp_path / "trace")
    assert records[4:] == [
        End(3, 1, None, "INTERNAL", "broken ?"),
        End(4, 2, None, "UNAVAILABLE", "gone"),
        End(6, 3, ModelOutput(6, [(1,)])),
    ]


def test_a_trace_is_private_and_the_previous_one_is_kept(tmp_path):
    path = tmp_path / "trace"
    path.write_text("of the run before")
    path.chmod(0o644)
    old = os.umask(0)
    try:
        JsonRecorder(str(path), CONFIG, LIMITS).close()
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (tmp_path / "trace.previous").read_text() == "of the run before"


def test_a_path_that_cannot_be_written_is_a_configuration_error(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for path, said in (
        (tmp_path / "missing" / "trace", "No such file"),
        (tmp_path, "is not a regular file"),
        (link, "is not a regular file"),
    ):
        with pytest.raises(ConfigError, match=f"record_path: cannot write '{path}': .*{said}"):
            JsonRecorder(str(path), CONFIG, LIMITS)
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_ends_only_the_recording(tmp_path, monkeypatch, caplog):
    path = tmp_path / "trace"
    recorder = JsonRecorder(str(path), CONFIG, LIMITS)
    write = os.write

    def write_half(file: int, data) -> int:
        if len(data) < 30:
            raise OSError(28, "No space left on device")
        return write(file, bytes(data)[: len(data) // 2])

    monkeypatch.setattr(os, "write", write_half)
    with caplog.at_level(logging.ERROR):
        recorder.begin(IterationInput(7, 1), FULL_BATCH)
        recorder.end(FULL_OUTPUT, 5)
        recorder.begin(IterationInput(8, 1), FULL_BATCH)
    assert len(caplog.records) == 1 and str(path) in caplog.text
    monkeypatch.undo()
    trace, records = trace_of(path)
    assert records == [] and trace.is_cut_short


def test_a_record_that_is_written_in_parts_is_complete(tmp_path, monkeypatch):
    recorder = JsonRecorder(str(tmp_path / "trace"), CONFIG, LIMITS)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, bytes(data)[:7]))
    recorder.begin(IterationInput(7, 1, (FULL_REQUEST,)), FULL_BATCH)
    monkeypatch.undo()
    assert trace_of(tmp_path / "trace")[1] == [Begin(IterationInput(7, 1, (FULL_REQUEST,)), FULL_BATCH)]


# ---------------------------------------------------------------------- reading

HEADER = encode(Header(CONFIG, LIMITS))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a file that record_path wrote, or it ends within its first line"),
        (HEADER[:-1], "it ends within its first line"),
        (b"hello\n", "not a file that record_path wrote: its first line is not the header of a trace"),
        (b'{"format":"other","version":1}\n', "not the header of a trace"),
        (encode(Begin(IterationInput(0, 0))), "not the header of a trace"),
        (
            HEADER.replace(b'"version":%d' % VERSION, b'"version":99'),
            f"version 99, .* reads version {VERSION}",
        ),
        (HEADER.replace(b'"limits"', b'"limit"'), "missing required field `limits`"),
        (HEADER + HEADER, "line 2: a second header"),
        (HEADER + b"[1, 2\n", "line 2: not a record"),
        (HEADER + encode(Begin(IterationInput(0, 0))) + b'{"record":"end"}\n', "line 3: not a record"),
        (HEADER + encode(End(1, 1, FULL_OUTPUT)), "left out"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(content, said):
    with pytest.raises(BadTrace, match=said):
        list(Trace(io.BytesIO(content)))


def test_an_unfinished_last_line_is_left_out():
    begin = encode(Begin(IterationInput(3, 0)))
    for length in range(1, len(begin)):
        trace = Trace(io.BytesIO(HEADER + begin + begin[:length]))
        assert list(trace) == [Begin(IterationInput(3, 0))] and trace.is_cut_short
    trace = Trace(io.BytesIO(HEADER + begin))
    assert len(list(trace)) == 1 and not trace.is_cut_short
