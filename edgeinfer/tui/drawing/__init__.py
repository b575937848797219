"""Conversations as wrapped lines of styled text: pure functions and values, no colours, no widgets."""
