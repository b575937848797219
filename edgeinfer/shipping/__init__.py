"""The one-file program ("shipped file"): its payload, unpacking, running from it, a model inside it."""
