"""What is under us: the computer's memory, processors, processes and disks, and where our files lie.

Knows no model and no request. What the launcher imports of it is the standard library alone.
"""
