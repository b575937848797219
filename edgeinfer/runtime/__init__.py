"""The engine: the only room that imports llama_cpp. Knows no HTTP and no terminal."""
