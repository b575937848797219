"""The engine: the only room that imports llama_cpp. Batching, sampling, prefix reuse. Knows no HTTP, no terminal."""
