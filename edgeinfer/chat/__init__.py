"""The chat without a screen: conversations, `/` commands, and the plain chat on text streams."""
