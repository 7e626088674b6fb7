"""Chats: rendering of messages to prompts, and parsing of texts to content, reasoning and tool calls.

It is independent of protocols and models, and used by front ends that serve chats.
"""
