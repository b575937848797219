"""The command line: the parser, one module per verb, and the results that are printed."""
