"""Model repositories without an engine: a model that counts, and can be told to fail or to be rank 0."""

from pathlib import Path

import pytest

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [
  { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "GAP_MS" data_type: TYPE_INT32 dims: [ 1 ] }
]
output [ { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters: {
  key: "gpt_model_path"
  value: { string_value: "${engine_dir}" }
}
parameters { key: "tokenizer_dir" value { string_value: "${tokenizer_dir}" } }
parameters { key: "dtype" value { string_value: "" } }
parameters { key: "fail_with" value { string_value: "" } }
"""

MODEL = """
import json
import os
import threading
import time

import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        reason = parameters["fail_with"]["string_value"]
        if reason:
            raise ValueError(reason)
        self.world = None
        if parameters.get("launch_mode", {}).get("string_value") == "leader":
            from mpi4py import MPI
            self.world = MPI.COMM_WORLD
            self.world.bcast(os.getpid())
        print("serving", parameters["gpt_model_path"]["string_value"], flush=True)

    def execute(self, requests):
        for request in requests:
            count, gap = (
                int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0]) for name in ("COUNT", "GAP_MS")
            )
            sender = request.get_response_sender()
            threading.Thread(target=self.answer, args=(sender, count, gap / 1000)).start()

    def answer(self, sender, count, gap):
        for number in range(count):
            time.sleep(gap)
            tensor = pb_utils.Tensor("NUMBER", numpy.array([number], numpy.int32))
            sender.send(pb_utils.InferenceResponse([tensor]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        for rank in range(1, self.world.size if self.world else 1):
            self.world.send(None, rank, tag=1)
        if self.world:
            from mpi4py import MPI
            MPI.Finalize()
"""

RANKS = """
parameters { key: "tensor_parallel_size" value { string_value: "${tensor_parallel_size}" } }
parameters { key: "pipeline_parallel_size" value { string_value: "" } }
parameters { key: "moe_expert_parallel_size" value { string_value: "" } }
parameters { key: "launch_mode" value { string_value: "" } }
parameters { key: "mpirun_arguments" value { string_value: "" } }
"""


@pytest.fixture
def counting_repository(tmp_path: Path) -> Path:
    """Make `tensorrt_llm` with its parameters, a counter in place of the model, and an empty demo model."""
    return make_counting_repository(tmp_path / "a repository")


def make_counting_repository(repository: Path) -> Path:
    """Write the models of `counting_repository` into a folder, and return it."""
    version = repository / "tensorrt_llm" / "1"
    (version / "demo_model").mkdir(parents=True)
    (version / "demo_model" / "config.json").write_text("{}")
    (version / "model.py").write_text(MODEL)
    (repository / "tensorrt_llm" / "config.pbtxt").write_text(CONFIG)
    return repository


@pytest.fixture
def ranked_repository(counting_repository: Path) -> Path:
    """Return `counting_repository` with parameters for several ranks."""
    config = counting_repository / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text() + RANKS)
    return counting_repository
