"""The HTTP endpoint. It imports neither llama_cpp nor code for terminals."""
