"""The platform: CPUs, memory, processes, disks, sockets, and the paths of our folders.

It knows nothing of models and requests. The launcher's modules need only the standard library.
"""
