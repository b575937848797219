"""Anthropic's messages API, which coding agents use."""
