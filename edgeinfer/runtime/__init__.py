"""The engine: the only package that imports llama_cpp. It has no code for HTTP or terminals."""
