"""What a load will allocate and where, worked out before it does. Pure arithmetic."""
