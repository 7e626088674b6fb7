"""Models that transformers' own code runs over this engine's blocks: tokens of its `generate`, and refusals."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import masking_utils
from transformers.models.stablelm import modeling_stablelm

import inflight.executor as trtllm
from inflight.additional_outputs import parse_outputs
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.engine import ModelEngine
from inflight.engine.layers.transformers_decoder import TransformersDecoder
from inflight.errors import ConfigError
from tests.engine.driver import alone, load_engine
from tests.engine.everything import assert_as_transformers, some_of_everything
from tests.engine.ranks import ranks
from tests.engine.serving import WAYS, config_of, load, serve, to_torch
from tests.engine.tables import TableOracle, make_table, with_table
from tests.models.zoo import Zoo, make_model
from tests.models.zoo_configs import VOCAB_SIZE, WITHOUT_MAP
from tests.tiers import examples, with_all

WITH_MAP = [
    "cohere2",
    "starcoder2",
    "llama-gqa",
    "gemma2",
    "mistral-layer-types",
    "mixtral",
    "gpt2",
    "phi3-longrope",
]
every_family = pytest.mark.parametrize(
    "case", with_all([*WITHOUT_MAP, "cohere2"], ["stablelm-head-norms", "cohere2"])
)
NUM_TOKENS = examples(24, all=64)
BOUND = 0.08
"""As in test_precision.py: root mean square error of bfloat16's logits over their standard deviation."""


def loaded(
    zoo: Zoo, case: str, num_blocks: int = 80, max_num_sequences: int = 8, **changes: Any
) -> ModelEngine:
    """Load by default for families that this engine lacks, and on request for others."""
    implementation = None if case in WITHOUT_MAP else "transformers"
    return load(
        zoo[case].folder, num_blocks, max_num_sequences, **{"implementation": implementation, **changes}
    )


# ---------------------------------------------------------------------- tokens


@every_family
def test_greedy_tokens_of_every_family_are_those_of_transformers(zoo: Zoo, case: str) -> None:
    model, engine = zoo[case], loaded(zoo, case)
    assert isinstance(engine.runner.decoder, TransformersDecoder) and engine.kernels == "transformers"
    requests = [
        Request(number, model.prompt(length, number), NUM_TOKENS)
        for number, length in enumerate((1, 5, 33, 70))
    ]
    served = serve(engine, config_of("no-evict"), requests)
    for request in requests:
        assert served.tokens(request) == model.greedy(request.input_token_ids, NUM_TOKENS)


@pytest.mark.parametrize("case", with_all([*WITHOUT_MAP, *WITH_MAP], ["stablelm-head-norms"]))
@pytest.mark.parametrize(
    "way", with_all(["no-evict", "utilization-chunked-no-reuse"], ["utilization-chunked-no-reuse"])
)
def test_packed_chunked_reused_and_paused_requests_give_transformers_tokens(
    zoo: Zoo, case: str, way: str
) -> None:
    """Packed, chunked, with reused blocks, paused; beams, drafts and prompt lookup."""
    requests = some_of_everything(zoo[case], examples(20, all=30))
    served = serve(loaded(zoo, case, 26), config_of(way), requests)
    assert (served.num_pauses > 0) == ("utilization" in way)
    assert_as_transformers(zoo[case], served, requests)


@pytest.mark.parametrize("way", with_all(WAYS, ["no-evict", "chunked"]))
def test_blocks_of_equal_prefixes_are_reused(zoo: Zoo, way: str) -> None:
    model = zoo["cohere2"]
    prompt, output = model.prompt(40), OutputOptions(return_perf_metrics=True)
    requests = [Request(number, (*prompt, 7 + number), 12, output=output) for number in range(3)]
    served = serve(loaded(zoo, "cohere2"), config_of(way), requests, per_iteration=1)
    assert_as_transformers(model, served, requests)
    reused = [served.result(request).perf_metrics.num_reused_blocks for request in requests]
    assert reused == [0, 0, 0] if "no-reuse" in way else reused[0] == 0 and min(reused[1:]) >= 4


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    ],
)
def test_sampling_controls_give_the_tokens_of_transformers(
    zoo: Zoo, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    model = zoo["helium"]
    prompts = [model.prompt(length, length) for length in (9, 30)]
    requests = [Request(n, prompt, 24, sampling=SamplingConfig(**ours)) for n, prompt in enumerate(prompts)]
    served = serve(loaded(zoo, "helium"), config_of("chunked"), requests)
    for request in requests:
        prompt = request.input_token_ids
        assert served.tokens(request) == model.generate(prompt, 24, **theirs) != model.greedy(prompt, 24)


def test_sampled_tokens_are_those_of_our_own_layers(zoo: Zoo) -> None:
    sampling = SamplingConfig(temperature=0.9, top_k=40, top_p=0.9, random_seed=7)
    requests = [Request(n, zoo["llama-gqa"].prompt(20 + n, n), 16, sampling=sampling) for n in range(3)]
    found = [
        serve(loaded(zoo, "llama-gqa", implementation=each), config_of("no-evict"), requests)
        for each in ("transformers", "torch")
    ]
    tokens = [[served.tokens(request) for request in requests] for served in found]
    assert tokens[0] == tokens[1] != [zoo["llama-gqa"].greedy(each.input_token_ids, 16) for each in requests]


def test_attention_windows_by_a_parameter_give_the_tokens_of_our_own_layers(zoo: Zoo) -> None:
    model, options = zoo["llama-gqa"], {"max_attention_window_size": (13, 24), "sink_token_length": 3}
    requests = [Request(n, model.prompt(30 + n, n), 16) for n in range(3)]
    theirs, ours = (
        serve(loaded(zoo, "llama-gqa", implementation=each, **options), config_of("no-evict"), requests)
        for each in ("transformers", "torch")
    )
    for request in requests:
        assert theirs.tokens(request) == ours.tokens(request) != model.greedy(request.input_token_ids, 16)


def test_prompt_tables_give_the_tokens_of_inputs_embeds(zoo: Zoo) -> None:
    rows = make_table(4)
    prompt = (*range(VOCAB_SIZE, VOCAB_SIZE + 4), *zoo["nemotron"].prompt(20))
    request = with_table(0, prompt, rows, 24)
    served = serve(loaded(zoo, "nemotron"), config_of("chunked"), [request])
    assert served.tokens(request) == TableOracle(zoo["nemotron"]).greedy(prompt, rows, 24)


@torch.inference_mode()
def test_logits_and_hidden_states_are_those_of_transformers(zoo: Zoo) -> None:
    model = zoo["cohere"]
    names = ["hidden_states_0", "hidden_states_2", "hidden_states_3", "last_hidden_state"]
    outputs = parse_outputs(",".join(f"{name}:context" for name in names))
    output = OutputOptions(
        return_context_logits=True, return_generation_logits=True, additional_outputs=outputs
    )
    request = Request(0, model.prompt(37), 5, output=output)
    engine = loaded(zoo, "cohere", additional_model_outputs=outputs)
    result = serve(engine, config_of("chunked"), [request]).result(request)
    found = model.oracle(torch.tensor([result.output_token_ids[0]]), output_hidden_states=True)
    logits = torch.cat([to_torch(result.context_logits), to_torch(result.generation_logits[0])[1:]])
    torch.testing.assert_close(logits, found.logits[0][:-1], rtol=0, atol=1e-4)
    expected = dict(zip(names, (found.hidden_states[number][0] for number in (0, 2, 3, 3)), strict=True))
    context = {
        each.name.removeprefix("context_"): to_torch(each.tensors[0]) for each in result.additional_outputs
    }
    for name in names:
        torch.testing.assert_close(context[name], expected[name][:37], rtol=0, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("case", with_all(["stablelm-head-norms", "nemotron"], ["nemotron"]))
def test_error_in_bfloat16_is_bounded(zoo: Zoo, case: str) -> None:
    model = zoo[case]
    prompt = model.prompt(32)
    row = alone(load_engine(model.folder, dtype="bfloat16"), prompt, 24)
    exact = model.logits(row.tokens)[len(prompt) - 1 : -1]
    assert (torch.stack(row.logits) - exact).square().mean().sqrt() / exact.std() < BOUND


def test_an_executor_serves_a_family_without_a_map(zoo: Zoo) -> None:
    """An executor serves a checkpoint folder with transformers' own layers, through the loop as in a server."""
    model = zoo["glm"]
    config = trtllm.ExecutorConfig(max_batch_size=4, kv_cache_config=trtllm.KvCacheConfig(max_tokens=512))
    prompts = [list(model.prompt(length)) for length in (6, 21, 40)]
    with trtllm.Executor(model.folder, trtllm.ModelType.DECODER_ONLY, config) as executor:
        output = trtllm.OutputConfig(exclude_input_from_output=True)
        ids = [executor.enqueue_request(trtllm.Request(each, 20, output_config=output)) for each in prompts]
        found = [executor.await_responses(each)[0].result.output_token_ids[0] for each in ids]
    assert found == [model.greedy(tuple(prompt), 20) for prompt in prompts]


# ---------------------------------------------------------------------- which engine


def test_the_log_says_that_transformers_code_runs_the_layers(
    zoo: Zoo, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        loaded(zoo, "stablelm-head-norms")
    assert re.search(
        "StableLmForCausalLM with qk_layernorm is not implemented here: transformers' own code runs it",
        caplog.text,
    )
    assert "the layers are transformers' own code (StableLmForCausalLM)" in caplog.text


def test_an_unknown_type_with_a_known_class_is_run_by_transformers(tmp_path: Path) -> None:
    """A model type that is not supported may differ from the class's own family, so our layers are not used."""
    model = make_model(tmp_path, "llama-gqa")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "internlm3"}))
    engine = load(tmp_path, 80, 8)
    assert engine.kernels == "transformers"
    request = Request(1, model.prompt(20), 30)
    served = serve(engine, config_of("no-evict"), [request])
    assert served.tokens(request) == model.greedy(model.prompt(20), 30)


def test_families_with_a_map_have_our_layers(zoo: Zoo) -> None:
    assert load(zoo["llama-gqa"].folder, 20).kernels in ("native", "torch")


def test_asking_for_our_layers_is_refused_for_other_families(zoo: Zoo) -> None:
    with pytest.raises(ConfigError, match=r"NemotronForCausalLM.*expected one of LlamaForCausalLM"):
        loaded(zoo, "nemotron", implementation="torch")
    with pytest.raises(ConfigError, match=r"key 'qk_layernorm' is True, expected false"):
        loaded(zoo, "stablelm-head-norms", implementation="torch")


def test_end_ids_are_those_of_generate(zoo: Zoo, tmp_path: Path) -> None:
    make_model(tmp_path, "helium")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert load(tmp_path, 20).eos_token_ids == (5, 9)
    assert loaded(zoo, "helium").eos_token_ids == (2,)


def test_long_rope_keeps_the_short_frequencies(tmp_path: Path) -> None:
    model = make_model(tmp_path, "phi3-longrope")
    config = model.oracle.config.to_dict() | {"original_max_position_embeddings": 64}
    config["rope_parameters"]["original_max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path, 20, implementation="transformers").limits.max_sequence_length == 64


# ---------------------------------------------------------------------- refusals


def write_config(folder: Path, **values: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}, "keeps a recurrent state"),
        ({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}, "keeps a recurrent state"),
        ({"model_type": "recurrent_gemma"}, "keeps a recurrent state"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "has an encoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "expected BertLMHeadModel"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "has no decoder of text"),
        ({"model_type": "nemotron", "vision_config": {"hidden_size": 8}}, "more than text (vision_config)"),
        ({"model_type": "mpt", "architectures": ["MptForCausalLM"]}, "attention interface"),
        ({"model_type": "llama", "architectures": ["LlamaForTokenClassification"]}, "LlamaForCausalLM"),
        (
            {
                "model_type": "theirs",
                "auto_map": {"AutoModelForCausalLM": "modeling_theirs.TheirsForCausalLM"},
            },
            "auto_map) is never run",
        ),
        ({"model_type": "theirs"}, "has no code for it"),
        ({"architectures": ["Theirs"]}, "has no code for it"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(
    tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    name = repr(values.get("model_type"))
    with pytest.raises(ConfigError, match=f"model_type {name}.* cannot be served.*{re.escape(reason)}"):
        load(write_config(tmp_path, **values), 20)


def test_code_of_a_checkpoint_is_not_run(zoo: Zoo, tmp_path: Path) -> None:
    """A checkpoint of a known type is computed by transformers' code, even if it brings its own code."""
    model = make_model(tmp_path, "nemotron")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "own.py").write_text("raise AssertionError('this was run')")
    engine = load(write_config(tmp_path, **config), 40)
    request = Request(0, model.prompt(9), 12)
    assert serve(engine, config_of("no-evict"), [request]).tokens(request) == model.greedy(
        model.prompt(9), 12
    )


@pytest.mark.parametrize(
    ("class_name", "changes", "reason"),
    [
        ("GptOss", {"head_dim": 8}, "the attention of layer 0 depends on s_aux"),
        ("Doge", {}, "layer 0 adds another mask to the scores"),
        ("MiniMax", {}, "2 of its 3 layers attend"),
        ("DeepseekV3", {"first_k_dense_replace": 3}, "queries of 192, keys of 192 and values of 128"),
    ],
)
def test_unsupported_attention_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, class_name: str, changes: dict[str, Any], reason: str
) -> None:
    monkeypatch.setitem(WITHOUT_MAP, "other", (class_name, changes))
    make_model(tmp_path, "other")
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path, 20, implementation="transformers")


def test_a_layer_that_mixes_rows_is_refused_with_its_error(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer reads the preceding row, as convolutions do."""
    forward = modeling_stablelm.StableLmMLP.forward
    monkeypatch.setattr(
        modeling_stablelm.StableLmMLP, "forward", lambda self, x: forward(self, x + x.roll(1, dims=1))
    )
    with pytest.raises(
        ConfigError, match=r"'stablelm'.*off by (0\.[1-9]|1\.)\d* of their standard deviation"
    ):
        loaded(zoo, "stablelm-head-norms")


def test_a_mask_of_another_kind_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunked(config: Any, **options: Any) -> Any:
        chunky = copy.copy(config)
        chunky.attention_chunk_size = 64
        return masking_utils.create_chunked_causal_mask(chunky, **options)

    monkeypatch.setattr(modeling_stablelm, "create_causal_mask", chunked)
    with pytest.raises(ConfigError, match=r"'stablelm'.*neither causal nor a sliding window"):
        loaded(zoo, "stablelm-head-norms")


@pytest.mark.parametrize("is_missing", [True, False])
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, is_missing: bool) -> None:
    make_model(tmp_path, "stablelm-head-norms")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if is_missing:
        del tensors["model.layers.1.mlp.up_proj.weight"]
    else:
        tensors["model.layers.1.mlp.side_proj.weight"] = torch.zeros(2)
    save_file(tensors, path, metadata={"format": "pt"})
    name = "missing keys.*layers.1.mlp.up_proj" if is_missing else "unexpected keys.*layers.1.mlp.side_proj"
    with pytest.raises(ConfigError, match=name):
        load(tmp_path, 20)


def test_weights_of_other_types_are_refused_or_converted(tmp_path: Path) -> None:
    make_model(tmp_path, "stablelm-head-norms").oracle.double().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"weights are of torch\.float64, expected torch\.float32"):
        load(tmp_path, 20, dtype=None)
    assert load(tmp_path, 20, dtype="float32").dtype == "float32"


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path, "stablelm-head-norms")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.oracle.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        load(tmp_path, 20)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "int8"}, "dtype is 'int8', expected float32"),
        ({"kernels": "native"}, "kernels is 'native', expected torch"),
        ({"lora_cache_gpu_memory_fraction": 0.1}, "lora_cache_gpu_memory_fraction is 0.1, expected 0"),
    ],
)
def test_unsupported_parameters_are_refused(zoo: Zoo, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        loaded(zoo, "stablelm-head-norms", **changes)


@pytest.mark.parametrize("topology", [(2, 1), (1, 2)])
def test_several_ranks_are_refused(zoo: Zoo, topology: tuple[int, int]) -> None:
    refused = pytest.raises(ConfigError, match="is 2, expected 1")
    with refused, ranks(zoo["stablelm-head-norms"].folder, topology):
        raise AssertionError("it was loaded")


def test_a_load_without_transformers_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"qk_layernorm.*pip install -e '\.\[transformers\]'"):
        loaded(zoo, "stablelm-head-norms")
    with pytest.raises(ConfigError, match="engine is transformers, which is not installed"):
        loaded(zoo, "llama-gqa")
