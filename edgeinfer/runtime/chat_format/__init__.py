"""A model's chat format: templates, tool calls, reasoning spans."""
