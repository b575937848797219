"""The HTTP endpoint: wire types, translation to engine requests, SSE, metrics. Knows no llama_cpp and
no terminal.
"""
