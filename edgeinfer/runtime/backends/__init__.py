"""GPU backends of llama.cpp as files: found, checked, and loaded when a device is asked for."""
