"""Guards of the endpoint: HTTP limits, and checks of Host, Origin, API key and user."""
