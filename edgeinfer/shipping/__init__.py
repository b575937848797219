"""The shipped file: its payload, unpacking it once, running from it, and putting a model inside. Unused
in a checkout.
"""
