"""Pure functions that draw conversations as wrapped lines of styled text, without any widget."""
