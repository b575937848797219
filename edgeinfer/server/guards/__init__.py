"""Guards of the endpoint: sockets, HTTP limits, and checks of Host, Origin, API key and user."""
