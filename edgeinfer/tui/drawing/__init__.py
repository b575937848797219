"""Conversations as lines of styled text: wrapped, but without a colour and without a widget.

Pure functions and values.
"""
