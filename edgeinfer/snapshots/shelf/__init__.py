"""Snapshots on the disk: their format, what they depend on, listing, choosing and pruning them."""
