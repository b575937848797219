"""From files to a model and a context, with every automatic choice and its reason."""
