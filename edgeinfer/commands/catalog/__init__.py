"""Verbs about models: fetching, listing, describing, converting, removing."""
