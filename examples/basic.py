"""One request and its answer, as token ids.

python examples/basic.py --model_path CHECKPOINT
"""

import argparse

import inflight.executor as trtllm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", required=True, help="folder of a Hugging Face checkpoint")
    arguments = parser.parse_args()

    with trtllm.Executor(
        arguments.model_path, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(1)
    ) as executor:
        # Under mpirun this is true on rank 0 only; the other ranks follow rank 0 until it ends.
        if executor.can_enqueue_requests():
            request_id = executor.enqueue_request(trtllm.Request(input_token_ids=[1, 2, 3, 4], max_tokens=10))
            (response,) = executor.await_responses(request_id)
            print(response.result.output_token_ids)


if __name__ == "__main__":
    main()
