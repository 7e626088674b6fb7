"""Convert a request of Dynamo's frontend, a dictionary, to a request of the engine.

The dictionary is the frontend's `PreprocessedRequest`: token ids and groups of options, in which None means not
given. Options that only the frontend acts on are skipped by name; every other option that is not converted here
is refused, because it could change the tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from inflight.core.kv.block_keys import PrefixIdentity, id_of_text
from inflight.core.request.engine_description import EngineDescription, ModelLimits
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import Origin, OutputOptions, Request
from inflight.core.request.sampling_config import CONTROLS, SamplingConfig
from inflight.errors import InvalidArgument, Name, RequestError, Unsupported

_Fields = Mapping[str, Any]

# Fields with which the frontend routes, migrates and traces a request; they do not change its tokens.
_ROUTING = {
    "model", "eos_token_ids", "mdc_sum", "annotations", "router_config_override", "router", "migration_link",
    "migration_state", "kv_hint", "agent_context", "image_cache_scope", "request_timestamp_ms", "tracker",
    "_HEALTH_CHECK",
}  # fmt: skip
_GROUPS = {
    "token_ids", "stop_conditions", "sampling_options", "output_options", "routing", "extra_args",
    "require_reasoning",
}  # fmt: skip
_STOPS = {
    "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "stop_token_ids_hidden", "stop_token_ids_visible",
    "stop",  # the frontend finds stop strings in the text
}  # fmt: skip
# Controls that Dynamo passes on as they are; top_k may be -1, and length_penalty is for beam searches.
_SAME = tuple(
    name
    for name, control in CONTROLS.items()
    if control.body and control.body.is_number and control.body.name == name
    if name not in ("top_k", "length_penalty")
)
_SAMPLING = {*_SAME, "n", "best_of", "top_k", "seed", "include_stop_str_in_output", "guided_decoding"}
_OUTPUTS = {
    "logprobs", "no_stop_trim",
    "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids",  # these concern the frontend's text
}  # fmt: skip
_LISTS = {"allowed_token_ids", "bad_words_token_ids"}

_FIELD_OF_TENSOR = {
    **{control.tensor: control.body.name for control in CONTROLS.values() if control.body},
    "request_output_len": "max_tokens",
    "input_ids": "prompt",
    "num_top_log_probs": "logprobs",
    "stop_words_list": "stop_token_ids",
    "bad_words_list": "bad_words_token_ids",
    "end_id": "stop_token_ids",
    "guided_decoding_guide_type": "guided_decoding",
    "guided_decoding_guide": "guided_decoding",
}


def in_fields(error: RequestError) -> RequestError:
    """Return the error with the names of fields that Dynamo's users know, in place of the engine's tensors."""
    return error.with_names(lambda name: _FIELD_OF_TENSOR.get(name, name))


def read_request(asked: _Fields, description: EngineDescription, request_id: str = "") -> Request:
    """Return the validated request for the engine.

    Args:
        asked: The frontend's request, with `token_ids` as a list.
        description: Description of the engine.
        request_id: Dynamo's id of the request, for log lines.

    Raises:
        InvalidArgument: A value that the engine cannot use.
        Unsupported: An option that this worker does not convert.
    """
    _refuse_others("", asked, _ROUTING | _GROUPS)
    names = ("stop_conditions", "sampling_options", "output_options", "routing", "extra_args")
    stops, sampling, outputs, routing, extra = (_group(asked, name) for name in names)
    _refuse_others("", stops, _STOPS)
    _refuse_others("", outputs, _OUTPUTS)
    _refuse_others("extra_args.", extra, {"sampling_options", "nvext"})  # `routing` has the values of nvext
    lists = _group(extra, "sampling_options")
    _refuse_others("", lists, _LISTS)
    if adapter := routing.get("lora_name"):
        raise Unsupported(Name("lora_name"), f": this worker serves no LoRA adapters, got {adapter!r}")
    guide = _guide(_group(sampling, "guided_decoding"))
    if guide is not None and asked.get("require_reasoning"):
        raise Unsupported(
            Name("guided_decoding"),
            " cannot be used with a reasoning parser: it would guide the reasoning too",
        )
    end_ids, returned_ids = _stop_ids(stops, sampling, outputs)
    prompt, min_tokens = tuple(asked["token_ids"]), stops.get("min_tokens") or 0
    salt, top = routing.get("cache_salt"), outputs.get("logprobs")
    request = Request(
        request_id=0,
        input_token_ids=prompt,
        max_new_tokens=_max_new_tokens(stops.get("max_tokens"), len(prompt), description.limits),
        streaming=True,
        end_ids=end_ids,
        sampling=_sampling(sampling, min_tokens, lists.get("allowed_token_ids") or ()),
        output=OutputOptions(
            exclude_input_from_output=True,
            return_log_probs=top is not None,
            num_top_log_probs=top or 0,
            return_perf_metrics=True,  # the usage has the number of cached tokens
        ),
        stop_words=tuple((token_id,) for token_id in returned_ids),
        stop_words_after=min_tokens,
        bad_words=tuple(map(tuple, lists.get("bad_words_token_ids") or ())),
        identity=PrefixIdentity(id_of_text(salt) if salt else 0),
        priority=_priority(routing.get("priority") or 0),
        guide=guide,
        origin=Origin("dynamo", request_id, str(asked.get("model") or "")),
    )
    try:
        request.validate(description.limits)
    except RequestError as error:
        raise in_fields(error) from None
    return request


def _group(asked: _Fields, name: str) -> _Fields:
    """Return a group of options; one that is missing or None has none."""
    given: _Fields | None = asked.get(name)
    return {} if given is None else given


def _refuse_others(prefix: str, given: _Fields, known: Collection[str]) -> None:
    """Raise Unsupported with the first option that has a value and is not among the `known` ones."""
    for name, value in given.items():
        if name not in known and value is not None and value is not False and value not in ({}, [], ""):
            raise Unsupported(
                Name(prefix + name), f" is not supported by this worker, got {str(value)[:100]}"
            )


def _max_new_tokens(wanted: int | None, prompt_length: int, limits: ModelLimits) -> int:
    """Return the largest number of tokens to generate, by default as many as fit; a longer prompt is refused."""
    return max(limits.room(prompt_length), 1) if wanted is None else wanted


def _stop_ids(stops: _Fields, sampling: _Fields, outputs: _Fields) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that end a sequence and are not returned, and those that end it and are returned."""
    hidden = () if stops.get("ignore_eos") else stops.get("stop_token_ids_hidden") or ()
    own = stops.get("stop_token_ids") or ()
    returned = {*(stops.get("stop_token_ids_visible") or ())}
    if sampling.get("include_stop_str_in_output"):
        returned |= {*own}
    if outputs.get("no_stop_trim"):
        returned |= {*own, *hidden}
    return tuple(sorted({*own, *hidden} - returned)), tuple(sorted(returned))


def _sampling(options: _Fields, min_tokens: int, allowed: Collection[int]) -> SamplingConfig:
    _refuse_others("", options, _SAMPLING)
    for name in ("n", "best_of"):  # Dynamo ends a worker's stream with the first choice that ends
        if options.get(name) not in (None, 1):
            raise Unsupported(Name(name), f" must be 1, got {options[name]}: send several requests")
    values: dict[str, Any] = {name: value for name in _SAME if (value := options.get(name)) is not None}
    if values.get("top_p") == 0.0:  # only the likeliest token; for the engine, it would mean no limit
        values["temperature"] = 0.0
    values["top_p"] = values.get("top_p") or 1.0
    seed = options.get("seed")
    return SamplingConfig(
        **values,
        top_k=max(options.get("top_k") or 0, 0),
        random_seed=secrets.randbits(64) if seed is None else seed % (1 << 64),
        min_length=min_tokens,
        allowed_token_ids=tuple(allowed),
    )


def _guide(options: _Fields) -> Guide | None:
    """Return the guide of Dynamo's `guided_decoding`, which has one value besides None."""
    _refuse_others("guided_decoding.", options, {"json", "regex", "grammar", "choice", "structural_tag"})
    given = {name: value for name, value in options.items() if value is not None and value != []}
    if len(given) > 1:
        raise InvalidArgument(
            Name("guided_decoding"), f" has {' and '.join(given)}, expected only one of them"
        )
    match next(iter(given.items()), None):
        case ("choice", choices):
            if not all(choices):
                raise InvalidArgument(Name("guided_decoding.choice"), " has an empty text")
            return Guide.of_choices(choices)
        case (name, value):
            kinds = {
                "json": GuideKind.JSON_SCHEMA,
                "regex": GuideKind.REGEX,
                "grammar": GuideKind.EBNF_GRAMMAR,
                "structural_tag": GuideKind.STRUCTURAL_TAG,
            }
            return Guide(kinds[name], value if isinstance(value, str) else json.dumps(value))
        case None:
            return None


def _priority(asked: int) -> float:
    """Convert Dynamo's priority (0 is usual, higher goes first) to the engine's (0 to 1, higher goes first)."""
    return 0.5 + 0.5 * asked / (1 + abs(asked))
