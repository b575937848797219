"""Find, pull, verify, convert and quantize models as files. Nothing here loads an engine."""
