"""A prompt with two images: token ids, and a prompt table with an image encoder's output for each image.

An encoder with a projector, as in LLaVA, converts an image to a matrix [rows, hidden_size] in the space of
the language model's embeddings. In this example random rows replace the encoder.

python examples/multimodal_rows.py --checkpoint CHECKPOINT --url localhost:8001
"""

import argparse
import json
from pathlib import Path

import numpy as np

from inflight.text.tokenizer import Tokenizer
from inflight_client import Client


def encode_image(number: int, num_rows: int, hidden_size: int) -> np.ndarray:
    """Return random rows [num_rows, hidden_size], which depend on the image's number only."""
    rows = np.random.default_rng(number).normal(scale=0.05, size=(num_rows, hidden_size))
    return rows.astype(np.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="what the server serves")
    parser.add_argument("--url", default="localhost:8001", help="the server's gRPC port")
    parser.add_argument("--rows", type=int, default=16, help="of an image")
    parser.add_argument("--max_tokens", type=int, default=20)
    arguments = parser.parse_args()
    config = json.loads((arguments.checkpoint / "config.json").read_text())
    vocab_size, num_rows = config["vocab_size"], arguments.rows
    tokenizer, client = Tokenizer.from_dir(arguments.checkpoint), Client(arguments.url, "tensorrt_llm")

    images = [encode_image(number, num_rows, config["hidden_size"]) for number in range(2)]
    table = np.concatenate(images)
    # The token id vocab_size + i stands for row i of the table, so an image is the ids of its rows.
    places = [range(vocab_size + num_rows * i, vocab_size + num_rows * (i + 1)) for i in range(2)]
    prompt = [
        *tokenizer.encode("What differs between "), *places[0],
        *tokenizer.encode(" and ", add_special_tokens=False), *places[1],
        *tokenizer.encode("?\n", add_special_tokens=False),
    ]  # fmt: skip
    for attempt in ("first", "again"):
        answer = client.generate(
            prompt, arguments.max_tokens, prompt_table=table, end_id=-1, return_perf_metrics=True
        )
        assert answer.perf_metrics is not None, "they are asked for"
        reused = answer.perf_metrics.kv_cache_reused_blocks
        print(
            f"{attempt}: {tokenizer.decode(answer.token_ids)!r}, {reused} blocks of the prompt found in the cache"
        )
    # If the rows precede a text, the server inserts their ids.
    print(f"one image: {client.generate('What is this?', 10, prompt_table=images[0], end_id=-1).text!r}")


if __name__ == "__main__":
    main()
