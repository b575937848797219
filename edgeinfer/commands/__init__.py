"""One file a verb: a function that returns a `Result`. Nothing here prints or exits."""
