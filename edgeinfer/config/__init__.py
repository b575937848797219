"""What can be set: config.toml, and the tables of options that command line, requests and engine read.

The tables are of the standard library alone, because the launcher reads them.
"""
