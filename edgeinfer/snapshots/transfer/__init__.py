"""Export snapshots as signed OCI images, and import those that fit this machine."""
