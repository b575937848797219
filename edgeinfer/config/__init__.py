"""The configuration: config.toml, and tables of options that need only the standard library."""
