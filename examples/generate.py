"""Generate a text for each prompt, then stream one text token by token.

python examples/generate.py --model_path CHECKPOINT "def area(width, height):" "import os"
"""

import argparse
import asyncio

import inflight.executor as trtllm
from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer


async def show_stream(executor: trtllm.Executor, model_path: str, prompt: str, max_tokens: int) -> None:
    """Print the text of each response as it arrives."""
    tokenizer = Tokenizer.from_dir(model_path)
    token_ids = tokenizer.encode(prompt)
    # A character may be spread over several tokens, and a continuation may begin with a space.
    text = IncrementalDetokenizer(tokenizer, prefix_ids=token_ids)
    async for response in executor.stream(trtllm.Request(token_ids, max_tokens)):
        print(repr(text.add(response.result.output_token_ids[0])), flush=True)
    print(repr(text.flush()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--max_tokens", type=int, default=20)
    parser.add_argument("prompts", nargs="*", default=["def area(width, height):\n", "import os\n"])
    arguments = parser.parse_args()

    with trtllm.Executor(arguments.model_path) as executor:
        for prompt, answer in zip(
            arguments.prompts, executor.generate(arguments.prompts, arguments.max_tokens), strict=True
        ):
            print(f"{prompt!r} -> {answer.text!r} ({answer.sequences[0].finish_reason.name})")
        asyncio.run(show_stream(executor, arguments.model_path, arguments.prompts[0], arguments.max_tokens))


if __name__ == "__main__":
    main()
