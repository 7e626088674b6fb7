"""Write a Hugging Face checkpoint with random weights, for tests and benchmarks that need only its shape.

Defines shapes, and the config.json of seven families. The loader determines which tensors there are; a test
loads every family with transformers. Weights are drawn in the loader's order from one seed.

Imports only the standard library until a checkpoint is written, so that `--help` needs no installation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.arguments import Parser, output_folder, program_name, whole

if TYPE_CHECKING:
    import torch

# The usual standard deviation of weights. A tiny model with it mostly repeats its last token; tests that
# need varied tokens use a larger one.
STANDARD_DEVIATION = 0.02


_MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder.

    Attributes:
        ffn: Inner width of the MLPs; in a family with experts, of each expert.
        experts: Number of experts in a layer, in a family with experts.
        experts_per_token: Number of experts per token, in a family with experts.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    positions: int
    rope_theta: float
    experts: int = 8
    experts_per_token: int = 2

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "tiny": Shape(2, 64, 4, 2, 128, 512, 2048, 10_000.0),
    "135m": Shape(30, 576, 9, 3, 1536, 49_152, 8192, 100_000.0),
    "1b": Shape(16, 2048, 32, 8, 8192, 128_256, 8192, 500_000.0),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
DTYPES = ("float32", "bfloat16", "float16")
_MXFP4 = "mxfp4"
_MARK = ".inflight-random-weights"
"""Name of an empty file beside written weights, which may be replaced."""
QUANTIZED_FORMATS = ("awq", "gptq", "int4", "int8", "fp8", _MXFP4)
"""The formats of `testing/quantize.py`. Repeated here, because this module must not import torch."""


def make_model(
    out: Path,
    family: str = "llama",
    shape: str | Shape = "tiny",
    dtype: str = "bfloat16",
    seed: int = 0,
    standard_deviation: float = STANDARD_DEVIATION,
    on_progress: Callable[[int], None] | None = None,
    quantize: str | None = None,
) -> Path:
    """Write the checkpoint into the folder `out` and return it; `on_progress` gets the number of values drawn.

    Args:
        out: Created if missing; files of the same names are overwritten.
        family: A key of `ARCHITECTURES`.
        shape: A key of `SHAPES`, or other sizes.
        dtype: Dtype of the stored weights, one of `DTYPES`. They are drawn in float32.
        seed: Equal seeds give equal files.
        standard_deviation: Standard deviation of all weights except the scales of norms, which are ones.
        quantize: Format of the projections, or of gpt_oss's experts, one of `QUANTIZED_FORMATS`; None: not
            quantized.
    """
    import torch
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  bare PathLike

    from inflight.models.loader import tensor_shapes
    from inflight.models.registry import read_model_description
    from inflight.testing.quantize import quantize_weights
    from inflight.testing.synthetic_tokenizer import BEGIN_ID, END_ID, PADDING_ID, write_tokenizer

    sizes = SHAPES[shape] if isinstance(shape, str) else shape
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).touch()
    _write_json(out / "config.json", config(family, sizes, dtype))
    weights: dict[str, torch.Tensor] = {}
    stored: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, dims in tensor_shapes(read_model_description(out)).items():
        is_scale = len(dims) == 1 and name.endswith(".weight")
        drawn = (
            torch.ones(dims) if is_scale else torch.randn(dims, generator=generator).mul_(standard_deviation)
        )
        weights[name] = drawn.to(stored)
        if on_progress is not None:
            on_progress(drawn.numel())
    if family == "gpt_oss":
        weights = _stack_experts(weights)
    if quantize is not None:
        weights, described = quantize_weights(quantize, weights, stored)
        _write_json(out / "config.json", config(family, sizes, dtype) | {"quantization_config": described})
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # save_file makes it readable by the owner only
    ids: dict[str, object] = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": PADDING_ID}
    _write_json(out / "generation_config.json", ids)
    write_tokenizer(out, sizes.vocabulary, sizes.positions)
    return out


def _stack_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack all experts of a layer: matrices [experts, inputs, outputs], rows of gate and up alternating."""
    import torch

    stacked: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, tensor in weights.items():
        prefix, is_expert, rest = name.partition(".experts.")
        if is_expert:
            by_module = experts.setdefault(f"{prefix}{is_expert}", {})
            by_module.setdefault(rest.split(".", 1)[1], []).append(tensor.t())
        else:
            stacked[name] = tensor
    for prefix, modules in experts.items():
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (torch.stack(modules[f"{m}_proj.{kind}"]) for m in ("gate", "up", "down"))
            stacked[f"{prefix}gate_up_proj{suffix}"] = torch.stack([gate, up], dim=-1).flatten(-2)
            stacked[f"{prefix}down_proj{suffix}"] = down.contiguous()
    return stacked


def num_weights(family: str, shape: Shape) -> int:
    """Return the number of values in the tensors of such a checkpoint."""
    from inflight.models.loader import tensor_shapes
    from inflight.models.registry import read_model_description

    with tempfile.TemporaryDirectory() as folder:
        _write_json(Path(folder, "config.json"), config(family, shape, "float32"))
        model = read_model_description(folder)
    return sum(prod(dims) for dims in tensor_shapes(model).values())


def config(family: str, shape: Shape, dtype: str) -> dict[str, object]:
    """Return the contents of config.json."""
    from inflight.testing.synthetic_tokenizer import BEGIN_ID, END_ID, PADDING_ID

    common: dict[str, object] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "torch_dtype": dtype,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": True,
        "initializer_range": STANDARD_DEVIATION,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PADDING_ID,
    }
    return common | (_gpt2_config(shape) if family == "gpt2" else _llama_like_config(family, shape))


def _llama_like_config(family: str, shape: Shape) -> dict[str, object]:
    experts = {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.ffn,
        "norm_topk_prob": True,
    }
    specific: dict[str, dict[str, object]] = {
        "llama": {"attention_bias": False, "mlp_bias": False},
        "mistral": {"sliding_window": None},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "attention_bias": False},
        "qwen3_moe": {"use_sliding_window": False, "attention_bias": False, **experts},
        "gpt_oss": {
            "attention_bias": True,
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "sliding_window": 128,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": shape.positions // 32,
            },
        },
    }
    return {
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        **specific[family],
    }


def _gpt2_config(shape: Shape) -> dict[str, object]:
    return {
        "activation_function": "gelu_new",
        "n_embd": shape.hidden,
        "n_inner": shape.ffn,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_positions": shape.positions,
        "layer_norm_epsilon": 1e-5,
    }


def _foreign_weights(folder: Path) -> Path | None:
    """Return a file of weights in a folder in which this program did not write; None if there is none."""
    if (folder / _MARK).exists():
        return None
    patterns = ("*.safetensors", "*.bin", "*.gguf", "*.pth")
    return next((path for pattern in patterns for path in sorted(folder.glob(pattern))), None)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _make_parser() -> Parser:
    parser = Parser(prog=program_name("scripts/make_model"), description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--shape", choices=SHAPES, default="tiny", help="size of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--family", choices=ARCHITECTURES, default="llama", help="family of models (default: %(default)s)"
    )
    parser.add_argument("--out", type=output_folder, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="data type of the weights (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=whole, default=0, help="seed of the random weights (default: %(default)s)"
    )
    parser.add_argument(
        "--std",
        type=float,
        default=STANDARD_DEVIATION,
        help="standard deviation of the weights (default: %(default)s)",
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZED_FORMATS,
        help="quantize the linear layers (with mxfp4: the experts of gpt_oss) in this format",
    )
    return parser


def _check(parser: Parser, given: argparse.Namespace) -> None:
    """Exit with an error if the options contradict each other, or a folder has weights of another model."""
    if given.quantize and given.family == "gpt2":
        parser.error("--quantize: gpt2's checkpoints have no such matrices; expected another --family")
    if given.quantize and (given.quantize == _MXFP4) != (given.family == "gpt_oss"):
        parser.error(f"--quantize {given.quantize} --family {given.family}: {_MXFP4} goes with gpt_oss alone")
    if given.seed > _MAX_SEED:
        parser.error(f"argument --seed: expected a number up to {_MAX_SEED}, got {given.seed}")
    if given.std < 0:
        parser.error(f"argument --std: expected a number from 0, got {given.std:g}")
    if foreign := _foreign_weights(given.out):
        parser.error(
            f"argument --out: {foreign} was not written by this command: expected a new folder, or that of "
            "a model with random weights"
        )


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint that the command line describes; return the exit status."""
    parser = _make_parser()
    given = parser.parse_args(arguments)
    _check(parser, given)
    from rich.console import Console
    from rich.progress import Progress

    total = num_weights(given.family, SHAPES[given.shape])
    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(f"drawing {total / 1e6:.1f} M weights", total=total)
            make_model(
                given.out,
                given.family,
                given.shape,
                given.dtype,
                given.seed,
                given.std,
                on_progress=lambda drawn: progress.advance(task, drawn),
                quantize=given.quantize,
            )
    except OSError as error:  # the disk is full
        sys.stderr.write(f"{parser.prog}: --out {given.out}: {error.strerror or error}\n")
        return 1
    stored = f"{given.quantize} and {given.dtype}" if given.quantize else given.dtype
    console.print(f"{given.out}: {given.family} {given.shape}, {total / 1e6:.1f} M weights, {stored}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
