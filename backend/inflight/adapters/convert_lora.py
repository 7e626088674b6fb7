"""`scripts/convert_lora`: converts a PEFT folder to the two files of TensorRT-LLM's converter.

Imports only the standard library until the command line is parsed, so that `--help` needs no installation.
"""

from __future__ import annotations

import sys
from pathlib import Path

from inflight.arguments import Parser, output_folder, program_name
from inflight.core.request.adapter import ITEM_SIZES
from inflight.errors import InflightError


def main(arguments: list[str] | None = None) -> int:
    """Convert the folder named on the command line; return the exit status."""
    parser = Parser(
        prog=program_name("scripts/convert_lora"),
        description="Write a PEFT folder's adapter as model.lora_weights.npy and model.lora_config.npy: the "
        "tensors lora_weights and lora_config of a request. As the folder N of lora_prefetch_dir they are the "
        "adapter of task id N.",
    )
    parser.add_argument(
        "folder", type=Path, metavar="PEFT_FOLDER", help="the folder written by PEFT's save_pretrained"
    )
    parser.add_argument(
        "out", type=output_folder, metavar="OUT", help="the folder for both files; created if it is missing"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoint of the adapter's model, to check the adapter's shapes; needed for DoRA",
    )
    parser.add_argument(
        "--storage-type",
        choices=ITEM_SIZES,
        default="float16",
        help="type of the numbers; the server's input lora_weights must have the same type (default: "
        "%(default)s)",
    )
    given = parser.parse_args(arguments)
    from inflight.adapters.lora_files import write_lora_files
    from inflight.adapters.peft_folder import read_peft_folder
    from inflight.models.registry import read_model_description

    if not given.folder.is_dir():
        parser.error(f"{given.folder}: no such folder")
    try:
        model = read_model_description(given.model) if given.model else None
        adapter = read_peft_folder(given.folder, model, given.storage_type)
        write_lora_files(adapter, given.out)
    except (OSError, InflightError) as error:
        sys.stderr.write(f"{given.folder}: {error}\n")
        return 1
    rows, width = adapter.weights.shape
    sys.stderr.write(f"{given.out}: {rows} rows of up to {width} numbers, {given.storage_type}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
