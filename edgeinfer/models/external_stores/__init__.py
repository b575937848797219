"""Models that other programs keep on this machine, used where they are and never written to."""
