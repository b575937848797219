"""Park, bake, dump, resume: the on-disk format, the fingerprint, CRIU, and the process that is
parked.
"""
