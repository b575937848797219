"""The Textual front end of the chat; `edgeinfer.chat` says and stores."""
