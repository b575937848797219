"""Export a snapshot as a signed OCI image of its inputs; an import rebuilds it from them."""
