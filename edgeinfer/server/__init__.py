"""The HTTP endpoint. Knows no llama_cpp and no terminal."""
