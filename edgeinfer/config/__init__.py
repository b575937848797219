"""The configuration: config.toml, and the tables of options that all packages read.

The tables need only the standard library, because the launcher reads them.
"""
