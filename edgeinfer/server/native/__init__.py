"""Routes of our own, in the names llama.cpp's server, Jina and Cohere gave them."""
