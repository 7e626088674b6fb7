"""`scripts/build`: builds a TensorRT engine from a checkpoint.

Imports only the standard library until the command line is parsed, so that `--help` needs no installation.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.arguments import Parser, output_folder, positive, program_name, whole
from inflight.checkpoint_config import DTYPES
from inflight.engine.tensorrt.build_options import WEIGHT_DTYPES, BuildOptions
from inflight.engine.tensorrt.module import MODULES, find_module
from inflight.errors import InflightError
from inflight.hub import find_checkpoint

if TYPE_CHECKING:
    from inflight.engine.tensorrt.sidecar import Sidecar


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    given = _parser().parse_args(arguments)
    from inflight.engine.tensorrt.build import build_engine
    from inflight.engine.tensorrt.build_progress import build_progress

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    options = BuildOptions(
        dtype=given.dtype,
        max_batch_size=given.max_batch_size,
        max_seq_len=given.max_seq_len,
        max_num_tokens=given.max_num_tokens,
        max_context_chunks=given.max_context_chunks,
        max_lora_rank=given.max_lora_rank,
        additional_outputs=tuple(given.additional_output),
        tensor_parallel_size=given.tp,
        attention=given.attention,
        weights=given.weights,
        target=given.target,
        module=given.module,
    )
    try:
        checkpoint = find_checkpoint(given.model, given.revision)
        with build_progress(find_module(options.module)) as monitor:
            built = build_engine(Path(checkpoint), given.output, options, monitor=monitor)
    except (OSError, InflightError) as error:
        sys.stderr.write(f"{program_name('scripts/build')}: {error}\n")
        return 1
    for sidecar in built:
        sys.stderr.write(_summary(given.output, sidecar))
    return 0


def _summary(folder: Path, sidecar: Sidecar) -> str:
    from inflight.engine.tensorrt.sidecar import sidecar_name

    names = [
        sidecar.layers.file.name,
        sidecar.head.file.name,
        *([sidecar.weights.name] if sidecar.weights else []),
    ]
    size = sum((folder / name).stat().st_size for name in names)
    settings = sidecar.settings
    return (
        f"{folder / sidecar_name(sidecar.rank)}: {settings.weight_dtype}, {settings.max_batch_size} sequences of "
        f"{settings.max_seq_len} tokens, {size / 1e9:.2f} GB, by {sidecar.module} {sidecar.module_version} for "
        f"compute capability {sidecar.processors}\n"
    )


def _parser() -> argparse.ArgumentParser:
    defaults = BuildOptions()
    parser = Parser(
        prog=program_name("scripts/build"),
        description="Build a TensorRT engine from a checkpoint: for each rank two plans and a description, "
        "in a folder. With TensorRT for RTX this needs no GPU.",
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="DIR",
        help="folder of a Hugging Face checkpoint, or its name on the hub",
    )
    add("--revision", help="branch, tag or commit, if --model is a name on the hub")
    add(
        "--output",
        required=True,
        type=output_folder,
        metavar="DIR",
        help="folder for the engine; created if it is missing",
    )
    add(
        "--dtype",
        choices=DTYPES + WEIGHT_DTYPES,
        help="data type of the weights; int4 for 4-bit checkpoints (default: the checkpoint's)",
    )
    add("--max-batch-size", type=positive, default=defaults.max_batch_size, metavar="N",
        help="maximum number of sequences at a time; each has its own memory for keys and values (default: "
             "%(default)s)")  # fmt: skip
    add("--max-seq-len", type=positive, metavar="N",
        help="maximum number of tokens of a sequence (default: the model's maximum, at most 4096)")  # fmt: skip
    add("--max-num-tokens", type=positive, default=defaults.max_num_tokens, metavar="N",
        help="maximum number of tokens that are computed at a time (default: %(default)s)")  # fmt: skip
    add("--max-context-chunks", type=positive, metavar="N",
        help="maximum number of context chunks that are computed at a time (default: 8, or "
             "--max-batch-size if that is less)")  # fmt: skip
    add("--max-lora-rank", type=whole, default=0, metavar="N",
        help="maximum sum of the ranks of a batch's LoRA adapters; 0: no adapters (default: "
             "%(default)s)")  # fmt: skip
    add("--additional-output", action="append", default=[], metavar="hidden_states_<i>",
        help="additional output: the hidden states after i layers; the flag may be repeated")  # fmt: skip
    add(
        "--tp",
        type=positive,
        default=1,
        metavar="N",
        help="number of tensor-parallel ranks (default: %(default)s)",
    )
    add(
        "--target",
        help="GPUs to build for: compute capabilities such as sm89 or sm80,sm89; portable: all GPUs that "
        "tensorrt_rtx supports; current: this machine's GPU (default: portable for tensorrt_rtx, current for "
        "tensorrt)",
    )
    add("--attention", choices=("split", "packed"), default=defaults.attention,
        help="split: context chunks and generation each have an attention operation of their own; packed: "
             "they share one operation, which tensorrt_rtx does not support (default: "
             "%(default)s)")  # fmt: skip
    add("--weights", choices=("constants", "inputs"), default=defaults.weights,
        help="constants: store the weights in the plans; inputs: store the weights in a separate file "
             "(default: %(default)s)")  # fmt: skip
    add(
        "--module",
        choices=MODULES,
        help="the TensorRT package to build with (default: the first that is installed)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
