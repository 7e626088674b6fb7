"""Convert a Hugging Face Llama checkpoint to a GGUF file for llama.cpp, in bfloat16 or Q8_0 (int8).

llama.cpp's own converter refuses unknown tokenizers. This converter writes no tokenizer, because the
benchmark only needs token ids. Needs numpy, safetensors and gguf. A checkpoint with rope_scaling is refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy
from gguf import GGMLQuantizationType

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder with bfloat16 weights")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "int8"), default="bfloat16")
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise SystemExit(f"{options.model}: expected a Llama checkpoint without rope_scaling")
    writer = gguf.GGUFWriter(options.out, "llama")
    _add_config(writer, config)
    weight_type = GGMLQuantizationType.BF16 if options.dtype == "bfloat16" else GGMLQuantizationType.Q8_0
    for name, values in _bfloat16_tensors(options.model):
        _add_tensor(writer, config, name, values, weight_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: gguf.GGUFWriter, config: dict) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _bfloat16_tensors(folder: Path) -> Iterator[tuple[str, numpy.ndarray]]:
    """Yield (name, bfloat16 values as bits in uint16) of each tensor, because numpy has no bfloat16."""
    for path in sorted(folder.glob("*.safetensors")):
        stored = numpy.memmap(path, numpy.uint8, "r")
        header_length = int(stored[:8].view("<u8")[0])
        header = json.loads(bytes(stored[8 : 8 + header_length]))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {entry['dtype']}, expected BF16")
            begin, end = (8 + header_length + offset for offset in entry["data_offsets"])
            yield name, stored[begin:end].view(numpy.uint16).reshape(entry["shape"])


def _add_tensor(
    writer: gguf.GGUFWriter, config: dict, name: str, values: numpy.ndarray, weight_type: GGMLQuantizationType
) -> None:
    heads = config["num_attention_heads"]
    if "q_proj" in name:
        values = _interleave_rotary(values, heads)
    elif "k_proj" in name:
        values = _interleave_rotary(values, config.get("num_key_value_heads") or heads)
    if values.ndim == 1:
        writer.add_tensor(_gguf_name(name), _float32(values))
    elif weight_type is GGMLQuantizationType.BF16:
        writer.add_tensor(_gguf_name(name), values.view(numpy.uint8), raw_dtype=weight_type)
    else:
        quantised = gguf.quants.quantize(_float32(values), weight_type)
        writer.add_tensor(_gguf_name(name), quantised, raw_dtype=weight_type)


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _interleave_rotary(values: numpy.ndarray, num_heads: int) -> numpy.ndarray:
    """Move Hugging Face's rotary pairs (i, i + head_dim / 2) next to each other, as in llama.cpp."""
    pairs = values.reshape(num_heads, 2, -1, values.shape[1]).swapaxes(1, 2)
    return numpy.ascontiguousarray(pairs.reshape(values.shape))


def _float32(values: numpy.ndarray) -> numpy.ndarray:
    return (values.astype(numpy.uint32) << 16).view(numpy.float32)


if __name__ == "__main__":
    main()
