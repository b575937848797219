"""What the launcher reads of a snapshot, and CRIU, which restores it: the standard library only."""
