"""Measure OpenAI-compatible servers, ours and others, by one client."""
