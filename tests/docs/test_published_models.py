"""The table of docs/models.md that says by which code published models run, by the names that people know.

It is made from `published_models.json`: names, the class in `architectures`, the family of a multimodal model's
text part if there are several, and for models whose class is refused without a reason of its own what they need.
`UPDATE_TABLES=1` rewrites it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from transformers.models.auto import modeling_auto

from inflight.models import FAMILIES
from inflight.models.unserved import UNSERVED
from inflight.multimodal import MULTIMODAL

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PUBLISHED: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("published_models.json").read_text(encoding="utf-8")
)
CONFIGS = json.loads(
    (Path(__file__).parents[1] / "models" / "published_configs.json").read_text(encoding="utf-8")
)
TYPES = json.loads(
    (Path(__file__).parents[1] / "engine" / "layers" / "causal_types.json").read_text(encoding="utf-8")
)
OF_TYPES = {
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
BY_TRANSFORMERS = {OF_TYPES[each] for each in TYPES["by transformers' code"]}
LACKING = {OF_TYPES[each]: needed for each, needed in UNSERVED.items()}
OF_FAMILIES = {family.architecture: family.model_type for family in FAMILIES}
OF_TEXT_PARTS = {each.architecture: each.text_type for each in MULTIMODAL}
WITHOUT_CONFIG = {
    "GraniteMoeSWAForCausalLM": "its published config.json is not known; its class has defaults of another model",
}
"""Classes of families whose published models cannot be checked with a configuration, and why."""
BEGIN, END = "<!-- published models -->\n", "\n<!-- end of published models -->"
WORDS = {"compiled": "compiled layers", "torch": "torch's operators"}


def text_family(model: dict[str, str]) -> str | None:
    """Return the family of the text part of a multimodal model; None for other models."""
    if model["architecture"] not in OF_TEXT_PARTS:
        return None
    section = PAGE.read_text().split("## Multimodal models")[1]
    row = re.search(rf"^\| `\w+` \| `{model['architecture']}` \| (.+) \|$", section, re.MULTILINE)
    assert row is not None
    families = re.findall(r"`(\w+)`", row[1])
    assert len(families) <= 1 or model.get("family") in families
    return model.get("family") or families[0]


def code_of(model: dict[str, str]) -> str:
    """Return what runs a model on a CPU, by the table of families."""
    architecture, text = model["architecture"], text_family(model)
    if reason := model.get("lacking"):
        return f"not served: {reason}"
    if needed := LACKING.get(architecture):
        return f"not served: it needs {needed}"
    family = text or OF_FAMILIES.get(architecture)
    if family is None:
        return "transformers' code"
    row = re.search(rf"^\| `{family}` \| `\w+` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert row is not None
    return WORDS[row[1]] + (" for the text part" if text else "")


def table() -> str:
    lines = ["| models | `architectures` | computed on a CPU by |", "|---|---|---|"]
    lines += [f"| {name} | `{each['architecture']}` | {code_of(each)} |" for name, each in PUBLISHED.items()]
    return "\n".join(lines)


def test_models_listed_as_served_are_those_of_served_architectures() -> None:
    served = {*OF_FAMILIES, *OF_TEXT_PARTS, *BY_TRANSFORMERS}
    for each in PUBLISHED.values():
        is_refused = "lacking" in each or each["architecture"] in LACKING
        assert is_refused != (each["architecture"] in served), each


def test_the_page_has_the_generated_table() -> None:
    head, rest = PAGE.read_text().split(BEGIN)
    shown, tail = rest.split(END)
    if os.environ.get("UPDATE_TABLES"):
        PAGE.write_text(head + BEGIN + table() + END + tail)
        shown = table()
    assert shown == table()


def test_the_table_has_the_class_of_every_published_configuration_in_the_tests() -> None:
    listed = {each["architecture"] for each in PUBLISHED.values()}
    assert {each["architectures"][0] for each in CONFIGS.values()} - listed == set()


def test_every_model_of_a_family_in_the_table_is_checked_with_a_published_configuration() -> None:
    """`tests/models/test_published_configs.py` reads these. transformers reads those that its own code runs."""
    classes = {values["architectures"][0] for values in CONFIGS.values()}
    text_parts = {
        (values["architectures"][0], values["text_config"].get("model_type"))
        for values in CONFIGS.values()
        if "text_config" in values
    }
    for model in PUBLISHED.values():
        if code_of(model).split(",")[0] not in WORDS.values():
            continue
        architecture, family = model["architecture"], model.get("family")
        is_checked = (architecture, family) in text_parts if family else architecture in classes
        assert is_checked == (architecture not in WITHOUT_CONFIG), model
