"""An engine in another process: client, server, and one socket between them."""
