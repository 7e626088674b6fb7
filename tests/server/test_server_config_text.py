"""Parameters of config.pbtxt as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.parameter_reader import is_filled
from inflight.server.config_text import (
    fill_fields,
    quote,
    read_parameters,
    set_decoupled,
    set_input_type,
    set_parameters,
    unquote,
)
from inflight.triton.config_pbtxt import MODELS, ModelSpec, render

FORMS = [
    'parameters { key: "a" value { string_value: "old" } }',
    'parameters: {\n  key: "a",\n  value: {\n    string_value: "old"\n  }\n}',
    "parameters [ { key: 'a' value: { string_value: 'old' } } ]",
    'parameters {key:"a" value{string_value:"o" "ld"}}',
    '# parameters { key: "a" }\nparameters { key: "a" # the key\n value < string_value: "old" > }',
]


@pytest.mark.parametrize("text", FORMS)
def test_each_form_of_an_entry_is_read_and_replaced(text: str) -> None:
    assert read_parameters(text) == {"a": "old"}
    changed = set_parameters(text, {"a": 'new "quoted" \\ path'})
    assert read_parameters(changed) == {"a": 'new "quoted" \\ path'}


def test_the_rest_of_the_text_is_unchanged() -> None:
    text = 'name: "m" # parameters\n' + FORMS[1] + "\ninstance_group [ { count: 1 } ]\n"
    assert set_parameters(text, {"a": "old"}) == text
    assert set_parameters(text, {"a": "b"}) == text.replace('"old"', '"b"')


def test_a_list_of_entries_is_read_and_replaced() -> None:
    text = (
        'parameters [\n{ key: "a" value { string_value: "1" } },\n{ key: "b" value { string_value: "2" } }\n]'
    )
    assert read_parameters(set_parameters(text, {"b": "3"})) == {"a": "1", "b": "3"}


def test_a_missing_entry_is_appended() -> None:
    text = 'name: "m"'
    assert read_parameters(set_parameters(text, {"new": "value"})) == {"new": "value"}
    assert set_parameters(text, {"new": "value"}).startswith('name: "m"\n')


def test_parameters_inside_other_blocks_do_not_belong_to_the_model() -> None:
    text = 'model_warmup [ { parameters { key: "a" value { string_value: "no" } } } ]'
    assert read_parameters(text) == {}


def test_without_values_to_set_the_text_is_unchanged() -> None:
    assert set_parameters("", {}) == ""
    assert set_parameters("name: 'm'", {}) == "name: 'm'"


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_parameters_that_were_set_are_read_back(values: dict[str, str]) -> None:
    assert read_parameters(set_parameters('name: "m"\n' + FORMS[0], values)) == {"a": "old"} | values


@given(st.text())
def test_unquoting_a_quoted_text_gives_the_text(text: str) -> None:
    assert unquote(quote(text)) == text


def test_numeric_escapes_are_bytes_of_utf8() -> None:
    assert unquote(r'"\303\xa9\n"') == "é\n"


@pytest.mark.parametrize(
    ("value", "filled"), [(None, False), ("", False), ("${engine_dir}", False), ("x${y}", True), ("/m", True)]
)
def test_unfilled_placeholders_count_as_absent(value: str | None, filled: bool) -> None:
    assert is_filled(value) is filled


POLICY = 'name: "m"\nmodel_transaction_policy { decoupled: %s }\ninput [ ]\n'


@pytest.mark.parametrize("before", ["true", "false", "True"])
@pytest.mark.parametrize(("decoupled", "after"), [(True, "true"), (False, "false")])
def test_setting_decoupled_replaces_any_value(before: str, decoupled: bool, after: str) -> None:
    assert set_decoupled(POLICY % before, decoupled) == POLICY % after
    lines = (POLICY % before).replace("{ dec", "{\n  dec").replace(" }\ni", "\n}\ni")
    assert f"decoupled: {after}\n}}" in set_decoupled(lines, decoupled)


def test_the_type_of_an_input_is_set_in_each_form() -> None:
    theirs = 'input [\n {\n  name: "a"\n  data_type: TYPE_FP16\n  dims: [ -1 ]\n }\n]'
    ours = '{ name: "ab" data_type: TYPE_FP16 }, { name: "a" data_type: TYPE_FP16 }'
    assert set_input_type(theirs, "a", "TYPE_FP32") == theirs.replace("FP16", "FP32")
    assert set_input_type(ours, "a", "TYPE_BF16").endswith("TYPE_BF16 }")
    assert '"ab" data_type: TYPE_FP16' in set_input_type(ours, "a", "TYPE_BF16")
    assert set_input_type(ours, "b", "TYPE_BF16") == ours


def test_set_decoupled_changes_no_text_without_a_transaction_policy() -> None:
    assert set_decoupled('name: "m"', False) == 'name: "m"'


def test_variables_outside_of_strings_get_defaults() -> None:
    rest = ' # ${decoupled_mode}\nx: "${logits_datatype} \\" ${a}" y: ${a}'
    assert fill_fields("max_batch_size: ${triton_max_batch_size}" + rest) == "max_batch_size: 64" + rest


@pytest.mark.parametrize("model", [model for model in MODELS if model.template], ids=lambda model: model.name)
def test_an_unfilled_template_equals_the_repositorys_config(model: ModelSpec) -> None:
    assert model.template is not None
    filled = fill_fields(render(model, model.template)).splitlines()
    # A variable in a string counts as absent: the default holds, which the repository spells out.
    filled = [line.replace("${tensorrt_llm_model_name}", "tensorrt_llm") for line in filled]
    batcher = filled.index("dynamic_batching {") if model.template.batching else len(filled)
    del filled[batcher : batcher + len(model.template.batching)]
    assert filled == render(model).splitlines()


@pytest.mark.parametrize("spaces", ["", " ", "\n  "])
def test_only_the_named_inputs_type_is_changed(spaces: str) -> None:
    def row(name: str, data_type: str) -> str:
        return f'{{ name:{spaces}"{name}"{spaces or " "}data_type:{spaces}{data_type} dims: [ -1, -1 ] }}'

    text = f"input [ {row('table', 'TYPE_FP16')}, {row('table_2', 'TYPE_FP16')} ]"
    expected = f"input [ {row('table', 'TYPE_BF16')}, {row('table_2', 'TYPE_FP16')} ]"
    assert set_input_type(text, "table", "TYPE_BF16") == expected
    assert set_input_type(text, "other", "TYPE_BF16") == text
