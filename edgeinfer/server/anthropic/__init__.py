"""Anthropic's messages: what coding agents speak."""
