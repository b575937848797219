"""Routes of edgeinfer's own API; names follow llama.cpp's server, Jina and Cohere."""
