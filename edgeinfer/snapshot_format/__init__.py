"""The files of a snapshot that the launcher reads, and running CRIU. Standard library only."""
