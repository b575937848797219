"""The endpoint's JSON, as types: every field that is accepted is here, every other one is refused by
name.
"""
