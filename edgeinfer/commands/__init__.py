"""One file a verb: a function that does the work and returns a `Result`. Nothing here prints or
exits.
"""
