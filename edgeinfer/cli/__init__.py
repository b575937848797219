"""The command line: the parser, one module per verb, results and their printing."""
