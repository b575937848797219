"""From conversations to prompts and back: templates, tools, reasoning, constraints."""
