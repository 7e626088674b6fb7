"""Clients of other projects that are tested, with their versions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A client that speaks to `/v1`.

    Attributes:
        name: Its name on docs/clients.md.
        packages: Packages of its environment with versions; the first one is the client.
        program: A file in `programs/`, or "" for a program of the package itself.
    """

    name: str
    packages: tuple[str, ...]
    program: str = ""

    @property
    def version(self) -> str:
        return self.packages[0].rpartition("@" if self.is_npm else "=")[2]

    @property
    def is_npm(self) -> bool:
        return "==" not in self.packages[0]


LIBRARIES = (
    Client("OpenAI Agents SDK", ("openai-agents==0.24.0",), "agents_sdk.py"),
    Client("Pydantic AI", ("pydantic-ai-slim[openai,anthropic]==2.68.0",), "typed_agents.py"),
    Client("Instructor", ("instructor==1.17.0",), "instructor_models.py"),
    Client("LiteLLM", ("litellm==1.110.2",), "litellm_providers.py"),
    Client("LlamaIndex", ("llama-index-llms-openai-like==0.8.1",), "llama_index_model.py"),
    Client("Vercel AI SDK", ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4"), "vercel_ai.mjs"),
)
CLAUDE_CODE = Client("Claude Code", ("@anthropic-ai/claude-code@2.1.332",))
CODEX = Client("Codex", ("@openai/codex@0.171.0",))
CONTINUE = Client("Continue's CLI", ("@continuedev/cli@1.5.47",))
OPEN_WEBUI = Client("Open WebUI", ("open-webui==0.12.4",))
LM_EVAL = Client("lm-eval", ("lm-eval[api]==0.4.13",))
GUIDELLM = Client("GuideLLM", ("guidellm==0.8.1",))
CLIENTS = (*LIBRARIES, CLAUDE_CODE, CODEX, CONTINUE, OPEN_WEBUI, LM_EVAL, GUIDELLM)
