"""Ollama's API, for clients that speak nothing else."""
