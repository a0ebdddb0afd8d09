"""Parses a chat model's text into reasoning, content and tool calls."""
