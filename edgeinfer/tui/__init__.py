"""The Textual front of the chat: screens, widgets, drawing. What is said and stored belongs to `edgeinfer.chat`."""
