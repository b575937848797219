"""The command line: the parser, one module per verb, results and how they are printed."""
