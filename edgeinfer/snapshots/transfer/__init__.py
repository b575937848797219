"""Export what a snapshot is built of as a signed OCI image; import builds it here."""
