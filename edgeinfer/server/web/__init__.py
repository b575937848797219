"""The chat page: its files, its sign-in, and the conversations of the chat's store over HTTP."""
