"""Ollama's API, for clients that support no other."""
