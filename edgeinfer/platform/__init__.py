"""The platform: CPUs, memory, processes, disks, sockets, and the paths of our folders.

Nothing here depends on models or requests. The launcher's modules need only the standard library.
"""
