"""The engine, the only package that imports llama_cpp. It contains no HTTP and no terminal code."""
