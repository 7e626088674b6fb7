"""GptManager: the iteration loop and its four callbacks."""

from inflight.batch_manager.gpt_manager import GptManager

__all__ = ["GptManager"]
