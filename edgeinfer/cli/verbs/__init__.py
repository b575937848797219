"""One module per verb: `add_arguments(parser)`, if it takes any, and `run(options, host) -> Result`.

Nothing here prints a result or exits. `edgeinfer VERB --help` imports the verb's module, so expensive
imports are inside functions.
"""
