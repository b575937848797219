"""What is below the program: CPUs, memory, processes, disks, sockets, and the paths of our folders.

It knows nothing of models and requests. Modules that the launcher imports need only the standard
library.
"""
