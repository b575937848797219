"""Use the models of Ollama, LM Studio and Hugging Face's cache where they are, read-only."""
