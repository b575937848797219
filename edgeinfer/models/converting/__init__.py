"""Convert checkpoints (safetensors, config.json) and PEFT adapters to GGUF."""
