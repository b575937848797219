"""Conversations as wrapped lines of styled text, without colours or widgets: pure functions, values."""
