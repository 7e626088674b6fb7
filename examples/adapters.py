"""Generate for every prompt with the base model and with a LoRA adapter, in one batch.

python examples/adapters.py --model_path CHECKPOINT --adapter PEFT_FOLDER "def area(width, height):"
"""

import argparse

import inflight.executor as trtllm
from inflight.config import Parameters

NAME = "adapter"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--adapter", required=True, help="folder that PEFT's save_pretrained has written")
    parser.add_argument("--max_tokens", type=int, default=20)
    parser.add_argument("prompts", nargs="*", default=["def area(width, height):\n", "import os\n"])
    arguments = parser.parse_args()

    parameters = Parameters(lora_adapters=((NAME, arguments.adapter),))
    with trtllm.Executor(arguments.model_path, parameters=parameters) as executor:
        twice = [prompt for prompt in arguments.prompts for _ in range(2)]
        adapters = [None, NAME] * len(arguments.prompts)
        answers = executor.generate(twice, arguments.max_tokens, lora=adapters)
        for prompt, adapter, answer in zip(twice, adapters, answers, strict=True):
            print(f"{prompt!r} {adapter or 'bare'} -> {answer.text!r}")


if __name__ == "__main__":
    main()
