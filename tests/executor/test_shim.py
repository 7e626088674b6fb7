"""The package `tensorrt_llm`: installed from its folder, imported like in upstream's programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that `pip install ./tensorrt_llm_shim` installs."""
    folder = tmp_path_factory.mktemp("shim")
    source = shutil.copytree(ROOT / "tensorrt_llm_shim", folder / "source")  # pip builds in the folder
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    only_this = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(folder / "site")]
    subprocess.run([*pip, *only_this, str(source)], check=True, timeout=120)
    return folder / "site"


def run(site: Path, program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "backend")])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_executor_module_is_ours_under_every_spelling_of_the_import(installed: Path) -> None:
    run(
        installed,
        """
import tensorrt_llm.bindings.executor as trtllm
import tensorrt_llm.bindings as bindings
import inflight.executor
from tensorrt_llm.bindings import executor
from tensorrt_llm.bindings.executor import SamplingConfig
from tensorrt_llm.bindings.executor.kv_cache import KVCacheEvent
import tensorrt_llm.bindings.executor.kv_cache
assert trtllm is executor is bindings.executor is inflight.executor
assert trtllm.kv_cache.KVCacheEvent is KVCacheEvent and trtllm.SamplingConfig is SamplingConfig
""",
    )


def test_all_modules_have_one_version(installed: Path) -> None:
    program = """
import tensorrt_llm, tensorrt_llm.version, tensorrt_llm.bindings.executor as trtllm
print(tensorrt_llm.__version__ == tensorrt_llm.version.__version__ == trtllm.__version__)
"""
    assert run(installed, program).strip() == "True"


def test_objects_of_the_examples_need_no_executor(installed: Path) -> None:
    """A worker program's path is accepted although the program does not exist here."""
    run(
        installed,
        """
import datetime, pickle
from pathlib import Path
import tensorrt_llm
worker = Path(tensorrt_llm.__file__).parent / 'bin' / 'executorWorker'
import tensorrt_llm.bindings.executor as trtllm
config = trtllm.ExecutorConfig(2)
orchestrator = trtllm.OrchestratorConfig(True, str(worker))
config.parallel_config = trtllm.ParallelConfig(
    trtllm.CommunicationType.MPI, trtllm.CommunicationMode.ORCHESTRATOR, None, None, orchestrator)
assert config.parallel_config.orchestrator_config.worker_executable_path == str(worker)
config.logits_post_processor_config = trtllm.LogitsPostProcessorConfig()
config.logits_post_processor_config.processor_map = {"my_logits_pp": print}
output_config = trtllm.OutputConfig()
output_config.exclude_input_from_output = True
request = trtllm.Request(input_token_ids=[1, 2, 3, 4], max_new_tokens=25, end_id=2, client_id=123,
                         sampling_config=trtllm.SamplingConfig(2), output_config=output_config)
request.logits_post_processor_name = request.BATCHED_POST_PROCESSOR_NAME
assert request.output_config.exclude_input_from_output and request.sampling_config.beam_width == 2
debug = trtllm.DebugConfig(debug_tensor_names=["sequence_length"], debug_tensors_max_iterations=2)
assert trtllm.ExecutorConfig(1, debug_config=debug).debug_config.debug_tensors_max_iterations == 2
copy = pickle.loads(pickle.dumps(request))
assert copy.client_id == 123 and type(copy).__module__ == "inflight.executor.request"
""",
    )


def test_gpt_manager_and_its_argument_types_are_in_the_bindings(installed: Path) -> None:
    run(
        installed,
        """
import tensorrt_llm.bindings as bindings
assert bindings.TrtGptModelType.InflightBatching and bindings.SchedulerPolicy.MAX_UTILIZATION
assert bindings.InferenceRequest(1).request_id == 1
assert callable(bindings.GptManager) and bindings.TrtGptModelOptionalParams().normalize_log_probs
""",
    )


def test_a_missing_name_is_an_attribute_error(installed: Path) -> None:
    program = """
import tensorrt_llm.bindings as bindings
try:
    bindings.ModelConfig
except AttributeError as error:
    print(error)
"""
    assert "has no attribute 'ModelConfig'" in run(installed, program)


def test_importing_the_shim_imports_no_torch(installed: Path) -> None:
    program = "import sys, tensorrt_llm.bindings.executor; print('torch' in sys.modules)"
    assert run(installed, program).strip() == "False"
