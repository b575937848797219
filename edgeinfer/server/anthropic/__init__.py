"""Anthropic's Messages API, which coding agents use."""
