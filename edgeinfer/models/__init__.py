"""Find, pull, verify, convert and quantize models as files; no engine is loaded here."""
