"""Everything that holds a pointer: the only package that imports ctypes or llama_cpp."""
