"""Debug tensors of every iteration: kept for the last iterations, or written to files.

python examples/debug.py --model_path CHECKPOINT --max_iterations 2
"""

import argparse

import inflight.executor as trtllm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument(
        "--max_iterations", type=int, default=2, help="iterations to keep; 0: write files instead"
    )
    parser.add_argument("--tensor", action="append", help="name of a tensor (default: sequence_length)")
    arguments = parser.parse_args()

    debug_config = trtllm.DebugConfig(
        debug_tensor_names=arguments.tensor or ["sequence_length"],
        debug_tensors_max_iterations=arguments.max_iterations,
    )
    config = trtllm.ExecutorConfig(1, debug_config=debug_config)
    with trtllm.Executor(arguments.model_path, trtllm.ModelType.DECODER_ONLY, config) as executor:
        if not executor.can_enqueue_requests():
            return
        request_id = executor.enqueue_request(trtllm.Request(input_token_ids=[1, 2, 3, 4], max_tokens=5))
        executor.await_responses(request_id)
        for kept in executor.get_latest_debug_tensors():
            for name, tensor in kept.debug_tensors.items():
                print(f"iteration {kept.iter}: {name} {list(tensor.shape)} {tensor.flatten()[:8].tolist()}")


if __name__ == "__main__":
    main()
