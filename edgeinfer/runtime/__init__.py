"""The engine: the only package that imports llama_cpp. Knows no HTTP and no terminal."""
