"""The models of an endpoint: loaded on demand, named as clients do, changed where that is allowed."""
