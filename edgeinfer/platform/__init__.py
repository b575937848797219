"""The platform: CPUs, memory, processes, disks, sockets, and where our folders are.

Knows no model and no request. What the launcher imports of it needs only the standard library.
"""
