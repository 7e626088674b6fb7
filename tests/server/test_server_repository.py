"""The runtime repository that is written for --model, --dtype and --set."""

import json
import shutil
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from inflight.server.config_text import add_outputs, read_parameters
from inflight.server.errors import OptionError
from inflight.server.repository import Wanted, assemble, default_repository, fill

PRESENT = {"gpt_model_path": "${engine_dir}", "tokenizer_dir": "${tokenizer_dir}", "dtype": "", "policy": "a"}
NO_DEMO = Path("nowhere")


def parameters_of(folder: Path, model: str = "tensorrt_llm") -> dict[str, str]:
    return read_parameters((folder / model / "config.pbtxt").read_text())


def test_without_options_the_demo_model_is_served(counting_repository: Path, tmp_path: Path) -> None:
    runtime = assemble(counting_repository, tmp_path / "out", Wanted())
    demo = str((counting_repository / "tensorrt_llm" / "1" / "demo_model").resolve())
    assert runtime.checkpoint == demo
    assert runtime.models == ("tensorrt_llm",)
    assert parameters_of(runtime.path)["gpt_model_path"] == demo
    assert parameters_of(runtime.path)["tokenizer_dir"] == demo


def test_code_is_copied_and_weights_are_linked(counting_repository: Path, tmp_path: Path) -> None:
    (counting_repository / "tensorrt_llm" / "1" / "__pycache__").mkdir()
    version = assemble(counting_repository, tmp_path / "out", Wanted()).path / "tensorrt_llm" / "1"
    assert sorted(entry.name for entry in version.iterdir()) == ["demo_model", "model.py"]
    assert not (version / "model.py").is_symlink()
    assert (version / "demo_model").is_symlink()
    assert (version / "demo_model" / "config.json").read_text() == "{}"


def test_the_source_is_not_written_to(counting_repository: Path, tmp_path: Path) -> None:
    before = (counting_repository / "tensorrt_llm" / "config.pbtxt").read_text()
    assemble(counting_repository, tmp_path / "out", Wanted(dtype="float32"))
    assert (counting_repository / "tensorrt_llm" / "config.pbtxt").read_text() == before


def test_each_model_gets_the_parameters_it_has(counting_repository: Path, tmp_path: Path) -> None:
    front_end = counting_repository / "preprocessing"
    (front_end / "1").mkdir(parents=True)
    (front_end / "config.pbtxt").write_text(
        'parameters { key: "tokenizer_dir" value { string_value: "${tokenizer_dir}" } }\n'
        'parameters { key: "add_special_tokens" value { string_value: "true" } }\n'
    )
    wanted = Wanted(model=tmp_path / "m", settings={"add_special_tokens": "false"})
    runtime = assemble(counting_repository, tmp_path / "out", wanted)
    assert runtime.models == ("preprocessing", "tensorrt_llm")
    assert parameters_of(runtime.path, "preprocessing") == {
        "tokenizer_dir": str(tmp_path / "m"),
        "add_special_tokens": "false",
    }
    assert "add_special_tokens" not in parameters_of(runtime.path)


def filled(wanted: Wanted, present: dict[str, str] = PRESENT, source: Path = NO_DEMO) -> dict[str, str]:
    """Return the parameters of a repository with one engine."""
    return fill({"tensorrt_llm": present}, wanted, source)["tensorrt_llm"]


def demo_in(source: Path) -> str:
    folder = source / "tensorrt_llm" / "1" / "demo_model"
    folder.mkdir(parents=True)
    return str(folder)


def test_the_weights_option_sets_its_parameter() -> None:
    assert filled(Wanted(weights="mmap"), PRESENT | {"weights": "memory"})["weights"] == "mmap"


def test_model_and_dtype_options_set_their_parameters(tmp_path: Path) -> None:
    values = filled(Wanted(model=tmp_path, dtype="bfloat16"))
    assert values == PRESENT | {
        "gpt_model_path": str(tmp_path),
        "tokenizer_dir": str(tmp_path),
        "dtype": "bfloat16",
    }


def test_plans_set_the_engine_their_paths_and_the_batch_size(
    counting_repository: Path, tmp_path: Path
) -> None:
    """The folder of plans has a tokenizer; with --model, the checkpoint is the model's path."""
    plans = tmp_path / "plans"
    plans.mkdir()
    (plans / "rank0.json").write_text('{"settings": {"max_batch_size": 5}}')
    present = PRESENT | {"engine": "", "tensorrt_engine_dir": ""}
    values = filled(Wanted(engine_dir=plans), present)
    assert (values["engine"], values["gpt_model_path"], values["tokenizer_dir"]) == (
        "tensorrt",
        str(plans),
        str(plans),
    )
    values = filled(Wanted(engine_dir=plans, model=tmp_path), present)
    assert (values["tensorrt_engine_dir"], values["gpt_model_path"]) == (str(plans), str(tmp_path))
    runtime = assemble(counting_repository, tmp_path / "out", Wanted(model=plans))
    assert "max_batch_size: 5" in (runtime.path / "tensorrt_llm" / "config.pbtxt").read_text()
    fewer = Wanted(model=plans, settings={"max_batch_size": "3"})
    runtime = assemble(counting_repository, tmp_path / "fewer", fewer)
    assert "max_batch_size: 3" in (runtime.path / "tensorrt_llm" / "config.pbtxt").read_text()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "last_hidden_state"),
        ("top_2_logits", "top_2_logits, last_hidden_state"),
        ("last_hidden_state:context", "last_hidden_state:context"),
    ],
)
def test_a_model_that_embeds_gets_the_output_of_embeddings(tmp_path: Path, given: str, expected: str) -> None:
    (tmp_path / "model").mkdir()
    settings = {"additional_model_outputs": given} if given else {}
    for convert, wanted in (("embed", expected), ("auto", given or "${additional_model_outputs}")):
        target = tmp_path / convert
        assemble(default_repository(), target, Wanted(tmp_path / "model", settings=settings, convert=convert))
        text = (target / "tensorrt_llm" / "config.pbtxt").read_text()
        assert read_parameters(text)["additional_model_outputs"] == wanted
        assert ('"generation_last_hidden_state"' in text) == ("last_hidden_state" in wanted)


def test_a_classifier_gets_the_output_of_embeddings(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    for convert, is_wanted in (("auto", True), ("classify", True), ("none", False)):
        target = tmp_path / convert
        assemble(default_repository(), target, Wanted(folder, convert=convert))
        text = (target / "tensorrt_llm" / "config.pbtxt").read_text()
        assert (read_parameters(text)["additional_model_outputs"] == "last_hidden_state") == is_wanted


def test_settings_override_options(tmp_path: Path) -> None:
    wanted = Wanted(model=tmp_path, dtype="bfloat16", settings={"dtype": "float32", "tokenizer_dir": "/t"})
    values = filled(wanted)
    assert values == PRESENT | {"gpt_model_path": str(tmp_path), "tokenizer_dir": "/t", "dtype": "float32"}


def test_a_repository_with_a_model_path_keeps_it(tmp_path: Path) -> None:
    demo_in(tmp_path)
    present = PRESENT | {"gpt_model_path": "/own"}
    assert filled(Wanted(), present, tmp_path) == present | {"tokenizer_dir": "/own"}
    present |= {"tokenizer_dir": "/own_too"}
    assert filled(Wanted(), present, tmp_path) == present


def test_another_models_tokenizer_replaces_the_repositorys() -> None:
    present = PRESENT | {"gpt_model_path": "/own", "tokenizer_dir": "/own"}
    values = filled(Wanted(settings={"gpt_model_path": "/other"}), present)
    assert (values["gpt_model_path"], values["tokenizer_dir"]) == ("/other", "/other")


def test_every_model_uses_the_tokenizer_of_its_engine(tmp_path: Path) -> None:
    demo = demo_in(tmp_path)
    present = {
        "ensemble": {"tokenizer_dir": "", "tensorrt_llm_model_name": "tensorrt_llm"},
        "ensemble_2": {"tokenizer_dir": "", "tensorrt_llm_model_name": "second"},
        "second": PRESENT | {"gpt_model_path": "/second"},
        "tensorrt_llm": PRESENT,
    }
    values = fill(present, Wanted(), tmp_path)
    assert {model: known["tokenizer_dir"] for model, known in values.items()} == {
        "ensemble": demo,
        "ensemble_2": "/second",
        "second": "/second",
        "tensorrt_llm": demo,
    }
    assert values["tensorrt_llm"]["gpt_model_path"] == demo


def test_record_path_is_relative_to_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    present = PRESENT | {"record_path": "${record_path}"}
    for given, expected in (("a/b", str(tmp_path / "a" / "b")), ("/a/b", "/a/b"), ("", "")):
        values = filled(Wanted(settings={"record_path": given}), present)
        assert values["record_path"] == expected


def test_adapter_folders_are_relative_to_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sql").mkdir()
    present = PRESENT | {"lora_adapters": "${lora_adapters}", "lora_dir": "", "lora_prefetch_dir": ""}
    wanted = Wanted(
        settings={"lora_dir": "sql", "lora_prefetch_dir": "/p"},
        adapters=(("a", Path("sql")), ("b", tmp_path / "sql")),
    )
    values = filled(wanted, present)
    assert values["lora_adapters"] == f"a={tmp_path}/sql,b={tmp_path}/sql"
    assert (values["lora_dir"], values["lora_prefetch_dir"]) == (f"{tmp_path}/sql", "/p")


def test_missing_duplicate_and_ambiguous_lora_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a,b").mkdir()
    for adapters, settings, message in (
        ((("a", tmp_path / "none"),), {}, "--lora a=.*/none: there is no such folder"),
        ((("a", tmp_path / "a,b"),), {}, "a comma stands between adapters"),
        ((("a", tmp_path), ("a", tmp_path)), {}, "there are several adapters of this name"),
        ((("a", tmp_path),), {"lora_adapters": "a=/x"}, "set the same parameter"),
    ):
        with pytest.raises(OptionError, match=message):
            filled(Wanted(settings=settings, adapters=adapters), PRESENT | {"lora_adapters": ""})


@pytest.mark.parametrize("models", ["", "all_models/inflight_batcher_llm"])
def test_an_inputs_declared_type_matches_its_parameter(tmp_path: Path, models: str) -> None:
    source = default_repository().parent / models if models else default_repository()
    for name, value in (("set", "TYPE_BF16"), ("bad", "BF16")):
        runtime = assemble(source, tmp_path / name, Wanted(settings={"lora_weights_data_type": value}))
        for model in ("tensorrt_llm", "ensemble"):
            text = (runtime.path / model / "config.pbtxt").read_text()
            expected = "TYPE_BF16" if name == "set" else "TYPE_FP16"
            assert f'"lora_weights" data_type: {expected} dims' in text
            assert '"draft_logits" data_type: TYPE_FP32' in text or model == "ensemble"


def test_a_filled_in_template_keeps_its_declared_input_type(tmp_path: Path) -> None:
    shutil.copytree(default_repository().parent / "all_models" / "inflight_batcher_llm", tmp_path / "in")
    path = tmp_path / "in" / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text().replace("${lora_weights_data_type}", "TYPE_FP32"))
    runtime = assemble(tmp_path / "in", tmp_path / "out", Wanted())
    text = (runtime.path / "tensorrt_llm" / "config.pbtxt").read_text()
    assert '"lora_weights" data_type: TYPE_FP32 dims' in text


def test_max_queue_size_sets_no_dynamic_batcher_of_triton(tmp_path: Path) -> None:
    """Triton's dynamic batcher would bring the bound of its own queue, and half-second waits."""
    runtime = assemble(default_repository(), tmp_path / "out", Wanted(settings={"max_queue_size": "5"}))
    assert parameters_of(runtime.path)["max_queue_size"] == "5"
    assert "dynamic_batching" not in (runtime.path / "tensorrt_llm" / "config.pbtxt").read_text()


def test_an_unknown_key_is_refused_with_similar_keys() -> None:
    with pytest.raises(OptionError, match=r"'polcy'.*did you mean policy\?"):
        filled(Wanted(settings={"polcy": "b"}))
    with pytest.raises(
        OptionError, match=r"'posterior_threshold'.*a draft token is accepted if it is the model's"
    ):
        filled(Wanted(settings={"posterior_threshold": "0.09"}))
    with pytest.raises(OptionError, match=r"'max_seq_len'.*; here it is max_sequence_length$"):
        filled(Wanted(settings={"max_seq_len": "5"}))
    with pytest.raises(OptionError, match=r"'xyzzy'.*; docs/settings.md lists the parameters$"):
        filled(Wanted(settings={"xyzzy": "b"}))
    with pytest.raises(OptionError, match=r"it is a field of requests: set temperature in each request$"):
        filled(Wanted(settings={"temperature": "0.5"}))


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--model-repository"):
        assemble(tmp_path, tmp_path / "out", Wanted())


def test_the_batch_size_is_set_for_every_model(tmp_path: Path) -> None:
    wanted = Wanted(settings={"max_batch_size": "7", "dtype": "float32"})
    runtime = assemble(default_repository(), tmp_path / "out", wanted)
    for model in runtime.models:
        assert "\nmax_batch_size: 7\n" in (runtime.path / model / "config.pbtxt").read_text()
    assert parameters_of(runtime.path)["dtype"] == "float32"


@pytest.mark.parametrize("value", ["0", "-1", "many", ""])
def test_an_invalid_batch_size_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="max_batch_size"):
        assemble(default_repository(), tmp_path / "out", Wanted(settings={"max_batch_size": value}))


@pytest.mark.parametrize(("value", "written"), [("false", "false"), ("False", "false"), ("true", "true")])
def test_decoupled_mode_is_set_for_models_with_a_transaction_policy(
    tmp_path: Path, value: str, written: str
) -> None:
    runtime = assemble(default_repository(), tmp_path / "out", Wanted(settings={"decoupled_mode": value}))
    texts = {model: (runtime.path / model / "config.pbtxt").read_text() for model in runtime.models}
    found = {model: f"decoupled: {written} }}" in text for model, text in texts.items()}
    assert {model for model, has_it in found.items() if has_it} == {
        "tensorrt_llm",
        "ensemble",
        "tensorrt_llm_bls",
    }


def test_the_ensemble_is_decoupled_if_its_engines_model_is(tmp_path: Path) -> None:
    """tensorrtllm_backend's command lines set it for the engine's model only."""
    source = default_repository().parent / "all_models" / "inflight_batcher_llm"
    shutil.copytree(source, tmp_path / "source")
    config = tmp_path / "source" / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace("decoupled: ${decoupled_mode}", "decoupled: False"))
    runtime = assemble(tmp_path / "source", tmp_path / "out", Wanted())
    for model in ("tensorrt_llm", "ensemble"):
        assert "decoupled: false }" in (runtime.path / model / "config.pbtxt").read_text()


def test_a_decoupled_mode_that_is_neither_true_nor_false_is_refused(tmp_path: Path) -> None:
    wanted = Wanted(settings={"decoupled_mode": "maybe"})
    with pytest.raises(OptionError, match="decoupled_mode=maybe: expected true or false"):
        assemble(default_repository(), tmp_path / "out", wanted)


def test_a_preprocessing_model_with_the_checkpoints_path_is_not_an_engine(tmp_path: Path) -> None:
    """tensorrtllm_backend's preprocessing has the checkpoint's path too; the templates have no demo model
    beside them."""
    source = default_repository().parent / "all_models" / "inflight_batcher_llm"
    runtime = assemble(source, tmp_path / "out", Wanted(model=tmp_path / "m"))
    assert [launch.model for launch in runtime.launches] == ["tensorrt_llm"]
    assert runtime.checkpoint == str(tmp_path / "m")
    assert parameters_of(runtime.path, "preprocessing")["gpt_model_path"] == str(tmp_path / "m")
    assert "max_batch_size: 64\n" in (runtime.path / "preprocessing" / "config.pbtxt").read_text()


def test_additional_outputs_are_declared_by_every_model_that_has_them(tmp_path: Path) -> None:
    settings = {"additional_model_outputs": "last_hidden_state:context, top_2_logits"}
    runtime = assemble(default_repository(), tmp_path / "out", Wanted(settings=settings))
    expected = {
        "context_last_hidden_state": [-1, -1],
        "generation_last_hidden_state": [-1, -1, -1],
        "generation_top_2_logits": [-1, -1, -1],
    }
    for model in runtime.models:
        text = (runtime.path / model / "config.pbtxt").read_text()
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
        found = {each.name: list(each.dims) for each in config.output if each.name in expected}
        assert found == (expected if "additional_model_outputs" in config.parameters else {})
        assert {each.data_type for each in config.output if each.name in expected} <= {
            model_config_pb2.TYPE_FP32
        }
    assert "additional_model_outputs" in parameters_of(runtime.path, "ensemble")


def test_declared_outputs_are_not_declared_twice() -> None:
    text = 'output { name: "generation_a" data_type: TYPE_FP16 dims: [ -1, -1, -1 ] }'
    added = add_outputs(text, {"generation_a": 3, "context_a": 2})
    assert added.count("generation_a") == 1
    assert added.endswith('output { name: "context_a" data_type: TYPE_FP32 dims: [ -1, -1 ] }\n')
    assert add_outputs(text, {"generation_a": 3}) == text


def declared_types(runtime: Path) -> dict[str, int]:
    """Return each model's declared type of the prompt table."""
    configs = {
        path.parent.name: text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
        for path in runtime.glob("*/config.pbtxt")
    }
    return {
        name: each.data_type
        for name, config in configs.items()
        for each in config.input
        if each.name == "prompt_embedding_table"
    }


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "FP16"), ("TYPE_BF16", "BF16"), ("TYPE_FP32", "FP32")]
)
def test_the_prompt_table_is_declared_with_the_wanted_type(
    tmp_path: Path, value: str | None, expected: str
) -> None:
    settings = {} if value is None else {"prompt_embedding_table_data_type": value}
    runtime = assemble(default_repository(), tmp_path / "out", Wanted(settings=settings))
    models = ("tensorrt_llm", "tensorrt_llm_infer", "ensemble", "tensorrt_llm_bls")
    data_type = getattr(model_config_pb2, f"TYPE_{expected}")
    assert declared_types(runtime.path) == dict.fromkeys(models, data_type)


def test_a_front_ends_input_type_follows_its_engines_parameter(tmp_path: Path) -> None:
    """tensorrtllm_backend's ensemble has no variable for it."""
    source = tmp_path / "filled"
    shutil.copytree(default_repository(), source, ignore=shutil.ignore_patterns("demo_model"))
    config = source / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace("${prompt_embedding_table_data_type}", "TYPE_BF16"))
    runtime = assemble(source, tmp_path / "out", Wanted())
    assert set(declared_types(runtime.path).values()) == {model_config_pb2.TYPE_BF16}


def test_the_model_that_encodes_pictures_needs_a_vision_tower(tmp_path: Path) -> None:
    shown = tmp_path / "checkpoint"
    shutil.copytree(default_repository() / "tensorrt_llm" / "1" / "demo_model", shown)
    without = assemble(default_repository(), tmp_path / "without", Wanted(model=shown))
    assert "multimodal_encoders" not in without.models
    config = json.loads((shown / "config.json").read_text())
    config = config | {"model_type": "llava", "vision_config": {}, "text_config": config}
    (shown / "config.json").write_text(json.dumps(config))
    (shown / "preprocessor_config.json").write_text("{}")
    for vision in (True, False):
        runtime = assemble(default_repository(), tmp_path / str(vision), Wanted(model=shown), vision=vision)
        assert ("multimodal_encoders" in runtime.models) == vision
        assert (runtime.path / "multimodal_encoders").exists() == vision
