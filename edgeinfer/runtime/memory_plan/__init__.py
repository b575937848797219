"""Plan the memory of a load before it allocates: sizes and places. Pure arithmetic."""
