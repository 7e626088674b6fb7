"""Chats: messages to a prompt by the checkpoint's template, and a text back to content, reasoning and tool calls.

Knows no protocol and no model; the front ends that have chats import it.
"""
