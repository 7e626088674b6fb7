"""Anthropic's protocol: /v1/messages and /v1/messages/count_tokens.

`conversion` converts a body to the body of a chat, which runs as one of /v1/chat/completions does; `answers`
writes its answer as Anthropic's content blocks and events. Nothing here knows the engine.
"""
