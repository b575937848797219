"""The configuration: config.toml, and the tables of load options and sampling options.

The tables need only the standard library, because the launcher reads them.
"""
