"""The programs in examples/ run unchanged on a small checkpoint."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers

from inflight.ranks.launch import find_mpirun
from tests.tiers import with_all

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MPIRUN = ("--allow-run-as-root", "--oversubscribe")


ELSEWHERE = {
    "multimodal_rows.py": "tests/e2e/test_prompt_tables.py: it needs a server",
    "ray_serve.py": "tests/integrations/test_ray_serve.py: it needs Ray",
}


def run(checkpoint: Path, name: str, *arguments: str) -> str:
    """Run a program in this process, which has already imported what it needs, and return its output."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [name, "--model_path", str(checkpoint), *arguments])
        patch.chdir(ROOT)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


def run_alone(checkpoint: Path, name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Run a program in a process of its own, or in several under `launcher`, and return its output."""
    command = [*launcher, sys.executable, str(EXAMPLES / name), "--model_path", str(checkpoint), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(text: str) -> list[list[int]]:
    return [ast.literal_eval(line) for line in text.splitlines()]


def test_every_example_is_run_here() -> None:
    named = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text()))
    assert named == {path.name for path in EXAMPLES.glob("*.py")}


def test_the_basic_example_prints_the_models_tokens(checkpoint: Path, reference) -> None:
    assert rows(run_alone(checkpoint, "basic.py")) == [[[1, 2, 3, 4, *reference([1, 2, 3, 4], 10)]]]


def test_the_generate_example_prints_the_texts_of_all_prompts(checkpoint: Path) -> None:
    out = run(checkpoint, "generate.py", "--max_tokens", "5", "some text", "other").splitlines()
    assert [line.partition(" -> ")[0] for line in out[:2]] == ["'some text'", "'other'"]
    text = ast.literal_eval(out[0].partition(" -> ")[2].rpartition(" (")[0])
    assert "".join(map(ast.literal_eval, out[2:])).startswith(text)


def test_the_adapters_example_prints_texts_with_and_without_the_adapter(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ids = torch.tensor([tokenizer.encode("some text")])

    def text_of(model: torch.nn.Module) -> str:
        model.generation_config.eos_token_id = None
        output = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0]
        whole, prompt = (tokenizer.decode(each, skip_special_tokens=True) for each in (output, ids[0]))
        return whole.removeprefix(prompt)

    bare = text_of(model)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path)
    out = run(checkpoint, "adapters.py", "--adapter", str(tmp_path), "--max_tokens", "6", "some text")
    assert text_of(adapted) != bare
    assert out.splitlines() == [
        f"'some text' bare -> {bare!r}",
        f"'some text' adapter -> {text_of(adapted)!r}",
    ]


PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.csv"
    path.write_text("\n".join(",".join(map(str, prompt)) for prompt in PROMPTS) + "\n")
    return path


def test_the_advanced_example_prints_prompts_and_greedy_tokens(
    checkpoint: Path, reference, prompts: Path
) -> None:
    given = ("--input_tokens_csv_file", str(prompts), "--max_tokens", "6")
    outputs = [reference(prompt, 6) for prompt in PROMPTS]
    out = run(checkpoint, "advanced.py", *given)
    assert rows(out) == [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]


@pytest.mark.parametrize(
    "flag", with_all(["--streaming", "--exclude_input_from_output"], ["--exclude_input_from_output"])
)
def test_the_advanced_example_can_leave_the_prompt_out(
    checkpoint: Path, reference, prompts: Path, flag: str
) -> None:
    given = ("--input_tokens_csv_file", str(prompts), "--max_tokens", "6", flag)
    assert rows(run(checkpoint, "advanced.py", *given)) == [reference(prompt, 6) for prompt in PROMPTS]


@pytest.mark.exhaustive
def test_the_advanced_example_writes_beams_to_a_file(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    given = ("--input_tokens_csv_file", str(prompts), "--max_tokens", "6")
    written = tmp_path / "out.csv"
    beams = ("--beam_width", "2", "--streaming", "--output_tokens_csv_file", str(written))
    assert run(checkpoint, "advanced.py", *given, *beams) == ""
    assert [len(line.split(",")) for line in written.read_text().splitlines()] == [6] * 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["orchestrator", "leader"])
def test_the_advanced_example_gives_the_same_tokens_on_several_ranks(
    checkpoint: Path, reference, prompts: Path, mode: str
) -> None:
    given = ("--input_tokens_csv_file", str(prompts), "--max_tokens", "6", "--streaming")
    outputs = [reference(prompt, 6) for prompt in PROMPTS]
    orchestrated = ("--use_orchestrator_mode", "--num_ranks", "2") if mode == "orchestrator" else ()
    launcher = () if orchestrated else (find_mpirun(), *MPIRUN, "-n", "2")
    out = run_alone(checkpoint, "advanced.py", *given, *orchestrated, launcher=launcher)
    assert rows(out) == outputs


def test_the_debug_example_prints_the_tensors_of_each_iteration(checkpoint: Path) -> None:
    lines = run(checkpoint, "debug.py", "--max_iterations", "2").splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "sequence_length [1] [7]",
        "sequence_length [1] [8]",
    ]


@pytest.mark.parametrize("batched", with_all([False, True], [True]))
def test_the_logits_processor_example_prints_only_allowed_tokens(checkpoint: Path, batched: bool) -> None:
    out = run(checkpoint, "logits_processor.py", *(["--batched"] if batched else [])).splitlines()
    first, bounded = (ast.literal_eval(line.partition(": ")[2])[4:] for line in out)
    assert [line.partition(":")[0] for line in out] == ["client 1", "client 7"]
    assert len(first) == len(bounded) == 8
    assert all(token % 2 == 0 for token in first + bounded) and max(first) >= 100 > max(bounded)
