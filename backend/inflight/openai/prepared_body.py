"""Check a body's prompts against the model's limits, and make the engine's prompts.

Runs on the tokenizing threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.errors import InvalidArgument
from inflight.openai.answers import AnswerReceipt, Usage
from inflight.openai.errors import ApiError
from inflight.openai.log_probs import TokenNames
from inflight.openai.sampling import BodySettings, longest_prompt, make_prompt
from inflight.openai.serving_model import ServingModel
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.prompt import Prompt
from inflight.serving.reply import NewText, new_text


@dataclass(frozen=True, slots=True)
class PreparedBody:
    """The prompts of a body, and the data that its answer needs.

    Attributes:
        asked: Settings for all prompts.
        prompts: Prompts for the engine.
        usage: Counter of the answer's tokens.
        model_name: Model name in the answer.
        fingerprint: `system_fingerprint` of the answer.
        names: Names of tokens; None if the answer does not name tokens.
        hidden_ids: Ids of tokens that add nothing to a text.
        receipt: Receipt of the answer.
    """

    asked: BodySettings
    prompts: Sequence[tuple[Prompt, NewText]]
    usage: Usage
    model_name: str
    fingerprint: str
    names: TokenNames | None
    hidden_ids: frozenset[int]
    receipt: AnswerReceipt = field(default_factory=AnswerReceipt)

    def prompt_ids(self, batch_index: int) -> tuple[int, ...]:
        """Return the token ids of one prompt."""
        return self.prompts[batch_index][0].request.input_token_ids

    def of_last_chunk(self) -> dict[str, Any]:
        """Return the fields of a stream's last chunk (the one without choices); none without such a chunk."""
        body = self.asked.body
        usage = {"usage": self.usage.as_json()} if body.includes_usage else {}
        return {**usage, **self.receipt.of_answer(body)}


def check_number_of_sequences(model: ServingModel, num_prompts: int, n: int, field: str = "prompt") -> None:
    """Raise ApiError if a body requests too many sequences: `n` for each of its prompts, which `field` has.

    Must be called before tokenization, which takes long for many prompts.
    """
    field = "n" if n > 1 else field
    try:
        model.describe().limits.check_sequences(num_prompts, num_prompts * n, field)
    except InvalidArgument as error:
        raise ApiError(str(error), 400, field) from None


def prepare_body(
    model: ServingModel,
    asked: BodySettings,
    texts: Sequence[str | None],
    ids: Sequence[Sequence[int]],
    encoded: EncodedPrompt | None = None,
) -> PreparedBody:
    """Check all prompts against the model's limits, and return the prepared body. Errors name fields of the body.

    Args:
        model: The served model.
        asked: Settings for all prompts.
        texts: Text of each prompt; None for a prompt given as ids.
        ids: Token ids of each prompt.
        encoded: The only prompt, if it has pictures.
    """
    body, description = asked.body, model.describe()
    if body.return_receipt:
        _check_receipt(asked, len(ids))
    tokenizer = model.tokenizer()
    prompts: list[tuple[Prompt, NewText]] = []
    for text, of_prompt in zip(texts, ids, strict=True):
        kept = _truncated(asked, of_prompt, model)
        if asked.echo and (text is None or len(kept) < len(of_prompt)):
            text = tokenizer.decode(kept, asked.skip_special_tokens)
        prompt = make_prompt(asked, kept, text, description, model.encoder, encoded)
        prompts.append((prompt, new_text(prompt, tokenizer)))
    tells_tokens = asked.num_top is not None or asked.num_prompt_top is not None
    return PreparedBody(
        asked,
        prompts,
        Usage([prompt for prompt, _ in prompts], description.limits.tokens_per_block),
        body.model or model.names[0],
        model.fingerprint,
        TokenNames(model.token_bytes, body.return_tokens_as_token_ids) if tells_tokens else None,
        tokenizer.special_ids if asked.skip_special_tokens else frozenset(),
    )


def _check_receipt(asked: BodySettings, num_prompts: int) -> None:
    """Raise ApiError unless the answer comes from a single request to the engine."""
    if num_prompts > 1:
        raise ApiError(
            f"return_receipt is for one prompt, and prompt has {num_prompts}: send them one by one",
            400,
            "return_receipt",
        )
    if asked.max_tokens == 0:
        raise ApiError("return_receipt is for generated tokens, and max_tokens is 0", 400, "return_receipt")


def _truncated(asked: BodySettings, ids: Sequence[int], model: ServingModel) -> Sequence[int]:
    """Return the last tokens of a prompt, as many as truncate_prompt_tokens allows; -1: as many as fit."""
    most = asked.body.truncate_prompt_tokens
    if most is None:
        return ids
    if most == 0:
        raise ApiError(
            "truncate_prompt_tokens is 0, which leaves no prompt; -1 keeps what fits",
            400,
            "truncate_prompt_tokens",
        )
    if most < 0:
        most = longest_prompt(asked, len(ids), model.describe().limits)
    return ids[max(len(ids) - most, 0) :]
