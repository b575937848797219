"""Everything that holds a C pointer: the only package that imports ctypes or llama_cpp."""
