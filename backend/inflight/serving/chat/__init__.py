"""Chats: rendering of messages to prompts, and parsing of texts to content, reasoning and tool calls.

Knows no protocol and no model; front ends with chats import it.
"""
