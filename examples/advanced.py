"""Many concurrent requests: token ids from a CSV file, streamed or whole, with beams, on one rank or several.

python examples/advanced.py --model_path CHECKPOINT --input_tokens_csv_file prompts.csv --streaming
.venv/bin/mpirun -n 2 .venv/bin/python examples/advanced.py ...        # leader mode: rank 0 takes the requests
python examples/advanced.py ... --use_orchestrator_mode --num_ranks 2  # this program starts the ranks
"""

import argparse
import csv
import datetime
from pathlib import Path

import inflight.executor as trtllm


def read_prompts(path: Path) -> list[list[int]]:
    """Read one prompt per line."""
    with path.open(newline="") as file:
        return [[int(cell) for cell in row] for row in csv.reader(file) if row]


def make_config(arguments: argparse.Namespace) -> trtllm.ExecutorConfig:
    config = trtllm.ExecutorConfig(arguments.beam_width)
    if arguments.use_orchestrator_mode:
        orchestrator = trtllm.OrchestratorConfig(True)
        config.parallel_config = trtllm.ParallelConfig(
            trtllm.CommunicationType.MPI,
            trtllm.CommunicationMode.ORCHESTRATOR,
            None,
            list(range(arguments.num_ranks)),
            orchestrator,
        )
    return config


def enqueue(executor: trtllm.Executor, arguments: argparse.Namespace) -> dict[int, int]:
    """Enqueue a request for each prompt; return their indices by request id."""
    output = trtllm.OutputConfig(exclude_input_from_output=arguments.exclude_input_from_output)
    sampling = trtllm.SamplingConfig(arguments.beam_width)
    requests = [
        trtllm.Request(
            prompt,
            arguments.max_tokens,
            streaming=arguments.streaming,
            sampling_config=sampling,
            output_config=output,
        )
        for prompt in read_prompts(arguments.input_tokens_csv_file)
    ]
    return {request_id: number for number, request_id in enumerate(executor.enqueue_requests(requests))}


def collect(
    executor: trtllm.Executor, numbers: dict[int, int], timeout: datetime.timedelta
) -> dict[int, list[list[int]]]:
    """Return the output of each request by its index, a list of tokens for each beam."""
    outputs: dict[int, list[list[int]]] = {number: [] for number in numbers.values()}
    num_open = len(numbers)
    while num_open:
        for response in executor.await_responses(timeout):
            if response.has_error():
                raise SystemExit(f"request {response.request_id} failed: {response.error_msg}")
            result = response.result
            number = numbers[response.request_id]
            # Beams change while the search runs, so each streamed response has all tokens so far.
            if len(result.output_token_ids) > 1 or not outputs[number]:
                outputs[number] = result.output_token_ids
            else:
                outputs[number][0] += result.output_token_ids[0]
            num_open -= result.is_final
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--input_tokens_csv_file", type=Path, required=True)
    parser.add_argument("--output_tokens_csv_file", type=Path, help="written instead of printed")
    parser.add_argument("--max_tokens", type=int, default=10)
    parser.add_argument("--beam_width", type=int, default=1)
    parser.add_argument("--streaming", action="store_true")
    parser.add_argument("--exclude_input_from_output", action="store_true")
    parser.add_argument("--use_orchestrator_mode", action="store_true")
    parser.add_argument("--num_ranks", type=int, default=1, help="in orchestrator mode")
    parser.add_argument("--timeout_ms", type=int, default=10_000, help="of one wait for responses")
    arguments = parser.parse_args()

    with trtllm.Executor(
        arguments.model_path, trtllm.ModelType.DECODER_ONLY, make_config(arguments)
    ) as executor:
        if not executor.can_enqueue_requests():
            return
        numbers = enqueue(executor, arguments)
        outputs = collect(executor, numbers, datetime.timedelta(milliseconds=arguments.timeout_ms))
    rows = [beam for number in sorted(outputs) for beam in outputs[number]]
    if arguments.output_tokens_csv_file is None:
        for row in rows:
            print(row)
    else:
        with arguments.output_tokens_csv_file.open("w", newline="") as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
