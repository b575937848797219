"""Checkpoints as their makers publish them (safetensors, config.json) become GGUF files."""
