"""What besides its tokens makes a prompt's keys and values what they are, and so belongs into every block's key.

Two requests share a block only if everything here is equal. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from inflight.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """The part of a block's key that does not follow from its tokens.

    Attributes:
        cache_salt_id: Requests share blocks with requests of the same salt only. Tensor `cache_salt_id`.
        lora_task_id: The adapter that computes keys and values; None: the bare model. Tensor `lora_task_id`.
        prompt_table_digest: Digest of the content of the request's embedding table; empty without one. Equal ids
            that mean rows of different tables are different prompts, whatever their extra ids say.
        extra_ids: One per prompt token, 0 for text; empty: all 0. Tensor `prompt_table_extra_ids`.
    """

    cache_salt_id: int = 0
    lora_task_id: int | None = None
    prompt_table_digest: bytes = b""
    extra_ids: tuple[int, ...] = ()

    def scope(self, root: bytes) -> bytes:
        """What chains of digests start from; `root` itself for a request that is nothing special."""
        if not (self.cache_salt_id or self.lora_task_id is not None or self.prompt_table_digest):
            return root
        adapter = b"" if self.lora_task_id is None else self.lora_task_id.to_bytes(8, "big")
        parts = (root, self.cache_salt_id.to_bytes(8, "big"), adapter, self.prompt_table_digest)
        # Lengths go in: no part can be taken for another's end.
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return blake2b(framed, digest_size=16).digest()

    def validate(self, prompt_length: int) -> None:
        """Raise InvalidArgument unless all fit 64 bits and each prompt token has one extra id, or none has."""
        _check_uint64("cache_salt_id", self.cache_salt_id)
        if self.lora_task_id is not None:
            _check_uint64("lora_task_id", self.lora_task_id)
        if not self.extra_ids:
            return
        if len(self.extra_ids) != prompt_length:
            raise InvalidArgument(
                f"prompt_table_extra_ids must have one id for each of the {prompt_length} prompt tokens, "
                f"got {len(self.extra_ids)}"
            )
        _check_uint64("prompt_table_extra_ids", min(self.extra_ids))
        _check_uint64("prompt_table_extra_ids", max(self.extra_ids))


def _check_uint64(name: str, value: int) -> None:
    if not 0 <= value < 1 << 64:
        raise InvalidArgument(f"{name} must be in [0, 2**64), got {value}")
