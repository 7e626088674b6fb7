"""Random guides, and checks that a text follows its guide: by jsonschema, by `re`, and by a table of possible
endings."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

import jsonschema

from inflight.core.request.guide import Guide, GuideKind


@dataclass(frozen=True)
class Case:
    """A guide, and the schema or regular expression that its texts must match."""

    guide: Guide
    schema: Any = None
    pattern: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether both libraries allow the same texts for the guide."""
        return "maxLength" not in self.guide.text

    def check(self, text: str) -> None:
        """Raise if a text does not follow the guide."""
        if self.pattern:
            assert re.fullmatch(self.pattern, text), (self.guide, text)
            return
        value = json.loads(text)
        jsonschema.Draft202012Validator(self.schema).validate(value)


def make_case(seed: int) -> Case:
    """Make a case of a random kind."""
    rng = random.Random(seed)
    kind = rng.choice(["schema", "schema", "schema", "regex", "regex", "ebnf", "tags"])
    if kind == "schema":
        schema = make_schema(rng, 3)
        return Case(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)), schema)
    if kind == "regex":
        pattern = make_pattern(rng, 3)
        return Case(Guide(GuideKind.REGEX, pattern), pattern=pattern)
    if kind == "ebnf":
        return make_grammar(rng)
    return make_tags(rng)


def make_cases(first_seed: int, number: int) -> dict[int, Case]:
    """Make this number of cases from consecutive seeds, each with a different guide."""
    cases: dict[Guide, tuple[int, Case]] = {}
    seed = first_seed
    while len(cases) < number:
        case = make_case(seed)
        cases.setdefault(case.guide, (seed, case))
        seed += 1
    return dict(cases.values())


def make_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Make a schema whose texts are short."""
    kinds = ["integer", "number", "boolean", "null", "string", "enum", "pattern"]
    kind = rng.choice(kinds + (["object", "object", "array", "anyOf"] if depth else []))
    if kind == "object":
        names = rng.sample(["a", "id", "name", "value", "x1", "tags"], rng.randint(1, 3))
        required = [name for name in names if rng.random() < 0.7]
        return {
            "type": "object",
            "properties": {name: make_schema(rng, depth - 1) for name in names},
            "required": required,
            "additionalProperties": False,
        }
    if kind == "array":
        least = rng.randint(0, 2)
        items = make_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [make_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 7, -1.5, True, None, "a b", ""], rng.randint(1, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^(ab|cd)+x$", "^[0-9]{2}-[A-F]$"])}
    if kind == "string":
        least = rng.randint(0, 3)  # xgrammar has no escapes in such strings
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}
    if kind == "integer" and rng.random() < 0.5:
        least = rng.randint(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 100)}
    return {"type": kind}


def make_pattern(rng: random.Random, depth: int) -> str:
    """Make a regular expression in the syntax common to Python, Rust and xgrammar."""
    kind = rng.choice(["text", "class", "any"] + (["join", "join", "or", "repeat", "count"] if depth else []))
    if kind == "text":
        return rng.choice(["ab", "x", "no", "yes", "0", " ", r"\.", r"\(", "{\\}"[1:2] + "-"])
    if kind == "class":
        return rng.choice(["[a-f]", "[0-9]", "[^a-z\\n]", "[A-Z_]", "[ab0]"])
    if kind == "any":
        return rng.choice(["[a-z]{1,3}", "[0-9]+", "(foo|bar)?"])
    if kind == "or":
        return f"({make_pattern(rng, depth - 1)}|{make_pattern(rng, depth - 1)})"
    if kind == "repeat":
        return f"({make_pattern(rng, depth - 1)}){rng.choice('?*+')}"
    if kind == "count":
        least = rng.randint(0, 2)
        return f"({make_pattern(rng, depth - 1)}){{{least},{least + rng.randint(1, 2)}}}"
    return make_pattern(rng, depth - 1) + make_pattern(rng, depth - 1)


def make_grammar(rng: random.Random) -> Case:
    """Make an EBNF grammar of sums, and a regular expression of the same language."""
    digits, joint = rng.choice(["[0-9]", "[1-3]", "[a-d]"]), rng.choice(["+", "-", " and "])
    escaped = re.escape(joint)
    grammar = f'root ::= term ("{joint}" term)*\nterm ::= "(" {digits} ")" | {digits} {digits}?'
    term = rf"(\({digits}\)|{digits}{digits}?)"
    return Case(Guide(GuideKind.EBNF_GRAMMAR, grammar), pattern=f"{term}({escaped}{term})*")


def make_tags(rng: random.Random) -> Case:
    """Make structural tags with a boolean or a number, and a regular expression of all their texts."""
    name = rng.choice(["f", "call"])
    schema, inner = rng.choice([({"type": "boolean"}, "(true|false)"), ({"type": "null"}, "null")])
    tags = {
        "structures": [{"begin": f"<{name}>", "schema": schema, "end": f"</{name}>"}],
        "triggers": [f"<{name}"],
    }
    space = r"[\x20\x0A\x0D\x09]*"
    whole = rf"<{name}>{space}{inner}{space}</{name}>"
    return Case(Guide(GuideKind.STRUCTURAL_TAG, json.dumps(tags)), pattern=rf"(?s)({whole}|(?!<{name}).)*")


def make_bomb() -> Guide:
    """Make a small grammar that takes minutes to compile: its size doubles with every rule."""
    rules = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(1800))
    return Guide(GuideKind.EBNF_GRAMMAR, f'root ::= r0\n{rules}\nr1800 ::= "a"')
