"""The Textual app. Knows no llama_cpp and no HTTP."""
