"""Export the inputs of a snapshot as a signed OCI image; an import builds the snapshot from them."""
