"""Who may speak to the endpoint and how: sockets, HTTP limits, Host, Origin and keys."""
