"""GPU backends of llama.cpp as files: found, checked, and registered if a device is asked for."""
