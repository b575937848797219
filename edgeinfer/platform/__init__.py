"""The platform: CPUs, memory, processes, disks, sockets, and the paths of our folders.

It knows no models and no requests. Modules that the launcher imports need only the standard library.
"""
