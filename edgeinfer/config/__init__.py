"""The configuration: config.toml, and the tables of options that all packages read.

The tables are of the standard library alone, because the launcher reads them.
"""
