"""The Textual front end of the chat; `edgeinfer.chat` generates and stores answers."""
