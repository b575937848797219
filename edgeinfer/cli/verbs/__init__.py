"""One module per verb: functions that return a `Result`. Nothing here prints or exits."""
