"""Logits post-processors that allow only even token ids, or for one client only ids below a bound.

python examples/logits_processor.py --model_path CHECKPOINT
python examples/logits_processor.py --model_path CHECKPOINT --batched
"""

import argparse
from collections.abc import Sequence

import torch

import inflight.executor as trtllm

BOUNDED_CLIENT, BOUND = 7, 100
NAME = "even"


def even_only(
    request_id: int,
    logits: torch.Tensor,
    token_ids: Sequence[Sequence[int]],
    stream_ptr: int,
    client_id: int | None,
) -> None:
    """Change one request's logits in place.

    Args:
        request_id: The request's id.
        logits: [1, beams, vocab_size], on the model's device.
        token_ids: The tokens so far of each beam, including the prompt.
        stream_ptr: The CUDA stream on which the logits are computed; 0 on a CPU.
        client_id: The request's client_id.
    """
    logits[:, :, 1::2] = float("-inf")
    if client_id == BOUNDED_CLIENT:
        logits[:, :, BOUND:] = float("-inf")


def even_only_batched(
    request_ids: Sequence[int],
    logits: Sequence[torch.Tensor],
    token_ids: Sequence[Sequence[Sequence[int]]],
    stream_ptr: int,
    client_ids: Sequence[int | None],
) -> None:
    """Change the logits of all requests of an iteration in one call."""
    for each in zip(request_ids, logits, token_ids, client_ids, strict=True):
        even_only(*each[:3], stream_ptr, each[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--batched", action="store_true", help="one call for all requests of an iteration")
    arguments = parser.parse_args()

    config = trtllm.ExecutorConfig(1)
    processors = trtllm.LogitsPostProcessorConfig()
    if arguments.batched:
        processors.processor_batched = even_only_batched
    else:
        processors.processor_map = {NAME: even_only}
    config.logits_post_processor_config = processors
    name = trtllm.Request.BATCHED_POST_PROCESSOR_NAME if arguments.batched else NAME

    with trtllm.Executor(arguments.model_path, trtllm.ModelType.DECODER_ONLY, config) as executor:
        if not executor.can_enqueue_requests():
            return
        ids = executor.enqueue_requests(
            [
                trtllm.Request([1, 2, 3, 4], max_tokens=8, client_id=client, logits_post_processor_name=name)
                for client in (1, BOUNDED_CLIENT)
            ]
        )
        for responses in executor.await_responses(ids):
            for response in responses:
                text = response.error_msg if response.has_error() else response.result.output_token_ids[0]
                print(f"client {response.client_id}: {text}")


if __name__ == "__main__":
    main()
