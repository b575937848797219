"""Pictures and documents: read in processes with limits, as pixels and text."""
