"""One module per verb: `run(options, host) -> Result`, and `add_arguments(parser)` if it has arguments.

Verbs neither print their results nor exit. `edgeinfer VERB --help` imports the verb's module, so slow
imports are inside functions.
"""
