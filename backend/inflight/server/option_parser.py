"""The options of `scripts/serve`. Standard library only, so that --help needs no installation."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from inflight.arguments import Parser, folder_name, port, positive, program_name, seconds, whole
from inflight.log_lines import FORMATS
from inflight.openai.options import add_arguments
from inflight.parameter_spec import KV_EVENTS, SPECULATION, URL
from inflight.server.client_apis import CONTROL_KEY_HEADER, CONTROL_KEY_VARIABLE
from inflight.server.option_types import add_checkpoint, named_folder, setting, size, value_of
from inflight.server.other_servers import FLAGS
from inflight.server.ranks import Mode
from inflight.server.repository import default_repository


def make_parser(given_as: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
    """Make the parser of the command line. `given_as`: see `Parser`."""
    parser = Parser(
        other_flags=FLAGS,
        given_as=given_as,
        prog=program_name("scripts/serve"),
        description="Start tritonserver in the foreground, and print READY when every model is ready.",
        epilog="--no-venv, an option of the script itself, uses the active Python environment instead of .venv. "
        "docs/settings.md lists the parameters for --set; "
        "--set max_batch_size=N is the number of sequences that run at a time; with "
        "--set decoupled_mode=false, tensorrt_llm and ensemble give one response per request.",
    )
    _add_model_options(parser)
    _add_draft_options(parser)
    _add_kv_cache_options(parser)
    _add_address_options(parser)
    _add_running_options(parser)
    _add_log_options(parser)
    _add_api_options(parser)
    _add_program_options(parser)
    _add_rank_options(parser)
    add_arguments(parser)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_checkpoint(parser, "Hugging Face checkpoint or GGUF file to serve (default: the demo model)")
    add(
        "--weights",
        choices=("memory", "mmap"),
        help="mmap: on a CPU, map the weights from a file that the first start writes to ~/.cache/inflight "
        "(default: memory)",
    )
    add(
        "--lora",
        metavar="NAME=PEFT_FOLDER",
        type=named_folder,
        action="append",
        default=[],
        help="a LoRA adapter that requests may name; the flag may be repeated",
    )
    add(
        "--set",
        metavar="KEY=VALUE",
        type=setting,
        action="append",
        default=[],
        help="set one of the settings of docs/settings.md; the flag may be repeated",
    )


def _add_draft_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--speculate",
        metavar="METHOD[:K]",
        type=value_of(SPECULATION),
        help="draft up to K next tokens of each sequence; prompt-lookup: draft from the sequence's own "
        "tokens; suffix: draft from the sequence's own tokens and recent answers; mtp: draft with the "
        "checkpoint's own draft head or the head in --draft-model; eagle3: draft with the head in "
        "--draft-model; none: draft only for requests that ask for prompt lookup (default: none; K is 1 for "
        "mtp, 3 for eagle3, and 8 for the other methods)",
    )
    add(
        "--draft-model",
        metavar="DIR",
        type=Path,
        help="folder of a draft head: either an EAGLE-3 head, which implies --speculate eagle3, or Gemma 4's "
        "draft head, which implies --speculate mtp:3; a whole model is refused",
    )


def _add_kv_cache_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--kv-cache-dir",
        metavar="DIR",
        type=folder_name,
        help="folder in which the server saves KV blocks, to reuse them even after a restart",
    )
    add(
        "--kv-cache-disk",
        metavar="SIZE",
        type=size,
        help="maximum size of the files in --kv-cache-dir, such as 500M or 20G (default: 10G)",
    )
    add(
        "--kv-events-config",
        metavar="JSON",
        type=value_of(KV_EVENTS),
        help="publish KV cache events over ZeroMQ, in vLLM's format, for programs that route requests to "
        "servers; with the JSON {}, the server publishes at tcp://*:5557",
    )


def _add_address_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for service, default in (("http", 8000), ("grpc", 8001), ("metrics", 8002), ("openai", 9000)):
        explanation = "default: %(default)s; 0: any free one"
        flags = ("--port", "--openai-port") if service == "openai" else (f"--{service}-port",)
        add(*flags, dest=f"{service}_port", type=port, default=default, metavar="PORT", help=explanation)
    add("--no-openai", action="store_true", help="serve only Triton's endpoints, without /v1")
    add("--no-vision", action="store_true", help="refuse pictures, and load no vision tower")
    add(
        "--no-triton",
        action="store_true",
        help="serve only /v1, without tritonserver and with the engine in this process; after a crash, the "
        "engine is not restarted",
    )


def _add_running_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--exit-timeout",
        type=seconds,
        default=30,
        metavar="SECONDS",
        help="maximum time that a shutdown waits for requests in flight (default: %(default)s)",
    )
    add(
        "--ready-timeout",
        type=positive,
        default=300,
        metavar="SECONDS",
        help="give up the start if, for this many seconds, the server logs no line, reads no file and fills no "
        "memory (default: %(default)s)",
    )
    add(
        "--restarts",
        type=whole,
        default=5,
        metavar="N",
        help="restart a server that has ended by itself, but give up after N failed starts in a row; 0: "
        "never restart the server (default: %(default)s)",
    )
    add(
        "--no-request-checks",
        action="store_true",
        help="do not refuse requests that would crash tritonserver (empty batches, shapes that overflow, ...)",
    )
    add(
        "--model-control",
        choices=("none", "explicit"),
        default="none",
        help="explicit: clients can unload and load models by requests with a key in the header "
        f"{CONTROL_KEY_HEADER}; the server's environment variable {CONTROL_KEY_VARIABLE} sets the key "
        "(default: %(default)s)",
    )


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="json: every process logs each line as a JSON object (default: %(default)s)",
    )
    add("--no-access-log", action="store_true", help="do not log a line for each request")
    add("--log-verbose", action="store_true", help="log everything that tritonserver's verbose log contains")
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        type=value_of(URL),
        help="address of a collector, such as http://localhost:4318/v1/traces, to which the server sends "
        "OpenTelemetry spans of all requests, by OTLP over HTTP",
    )


def _add_api_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--allow-shared-memory",
        action="store_true",
        help="let every client register shared memory of this machine, as perf_analyzer --shared-memory "
        "does; clients can then read and write the server's memory in /dev/shm",
    )
    add("--allow-logging", action="store_true", help="let every client change the settings of Triton's log")
    add("--allow-trace", action="store_true", help="let every client change the settings of Triton's traces")
    add(
        "--allow-model-config",
        action="store_true",
        help="let every client read the models' configurations, which name folders of this machine; "
        "perf_analyzer needs the configurations, and so does a server of /v1 on another host",
    )


def _add_program_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model-repository",
        type=Path,
        default=default_repository(),
        metavar="DIR",
        help="Triton model repository with the models to load",
    )
    add(
        "--write-repository",
        type=Path,
        metavar="DIR",
        help="start no server, but write the model repository to this new folder, for a tritonserver that "
        "another program starts",
    )
    add(
        "--tritonserver",
        type=Path,
        metavar="PATH",
        help="start this tritonserver, with the backends of its installation, in place of the tritonserver in "
        "nvidia-pytriton",
    )
    add(
        "--engine",
        choices=("torch", "transformers", "tensorrt"),
        help="what computes the layers; torch: this server's own code; transformers: the code of Hugging "
        "Face transformers, for any decoder whose attention the server can replace; tensorrt: TensorRT "
        "engines (plans) that scripts/build wrote (default: tensorrt for a folder of plans, torch for the "
        "model families that torch supports, transformers for other families)",
    )
    add(
        "--engine-dir",
        metavar="DIR",
        type=Path,
        help="folder of TensorRT engines (plans) that scripts/build wrote; without --model, the tokenizer is "
        "read from this folder, too",
    )


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tp",
        type=positive,
        metavar="N",
        help="number of tensor-parallel ranks (default: the number in the engine's config.pbtxt, or 1)",
    )
    add(
        "--pp",
        type=positive,
        metavar="M",
        help="number of pipeline-parallel ranks (default: the number in the engine's config.pbtxt, or 1)",
    )
    add(
        "--ep",
        type=positive,
        metavar="N",
        help="number of groups of tensor-parallel ranks; each group has a part of the experts; 1: every rank has "
        "a slice of every expert (default: the number in the engine's config.pbtxt, or 1)",
    )
    add(
        "--mode",
        choices=get_args(Mode),
        help="what starts the ranks; leader: this command; orchestrator: the model's process, which restarts "
        "the ranks if one is lost; in_process: there is only one rank, in the model's process (default: "
        "in_process for one rank, orchestrator for several)",
    )
    add(
        "--mpirun-arguments",
        metavar="ARGUMENTS",
        help='further arguments for mpirun, as one string: --mpirun-arguments="--hostfile hosts"',
    )
