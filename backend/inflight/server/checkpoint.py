"""Checks of a checkpoint before a start: where `--model` is, and into how many ranks it can be divided.

`inflight.hub` finds the folder. If config.json does not state a model's sizes, nothing is checked here, and
the engine reports errors when it loads the model.
"""

from pathlib import Path

from inflight import hub
from inflight.checkpoint_config import CheckpointFacts, checkpoint_name
from inflight.errors import ConfigError
from inflight.ranks.topology import tensor_parallel_sizes
from inflight.server.errors import OptionError


def find_checkpoint(model: str, revision: str | None = None, judge: hub.Judge | None = None) -> Path:
    """Return the folder that holds `model`; raises OptionError if there is none, or `judge` refuses it."""
    try:
        folder = hub.find_checkpoint(model, revision, judge=judge)
    except ConfigError as error:
        raise OptionError(f"--model {error}") from None
    return check_spelling(model, folder.resolve())


def check_rank_sizes(checkpoint: Path, tp: int, pp: int, ep: int = 1) -> None:
    """Raise OptionError, with the possible sizes, if the model cannot be divided among these ranks."""
    if tp == pp == 1:
        return
    try:
        facts = CheckpointFacts.read(checkpoint)
    except ConfigError:
        return  # loading the model reports the error
    name = checkpoint_name(checkpoint)
    if facts.num_layers is not None and pp > facts.num_layers:
        raise OptionError(
            f"--pp {pp}: every stage needs a layer, and {name} has {facts.num_layers} layers, "
            f"so --pp can be 1 to {facts.num_layers}"
        )
    num_heads, num_kv_heads, inner = facts.num_heads, facts.num_kv_heads, facts.mlp_size
    if num_heads is None or num_kv_heads is None or facts.hidden_size is None or inner is None:
        return
    if ep > 1:
        _check_experts(name, facts.num_experts, tp, ep)
    # The ranks of one expert-parallel group divide each of its experts.
    sizes = tensor_parallel_sizes(num_heads, num_kv_heads, inner * ep)
    if tp not in sizes:
        raise OptionError(
            f"--tp {tp}: does not divide {name}, which has {num_heads} heads, {num_kv_heads} key heads "
            f"and an MLP of {inner}, so --tp can be {', '.join(map(str, sizes))}"
        )


def _check_experts(name: str, count: int | None, tp: int, ep: int) -> None:
    if count is None:
        raise OptionError(f"--ep {ep}: {name} has no experts, so --ep can be 1")
    if count % ep:
        sizes = [size for size in range(1, tp + 1) if not (tp % size or count % size)]
        raise OptionError(
            f"--ep {ep}: does not divide the {count} experts of {name}, so with --tp {tp} it can be "
            f"{', '.join(map(str, sizes))}"
        )


def check_spelling(model: str, folder: Path) -> Path:
    """Return `folder`; raise OptionError if its path is not UTF-8, which config.pbtxt requires."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise OptionError(
            f"--model {model}: the folder's name is not UTF-8, as config.pbtxt has to be"
        ) from None
    return folder
