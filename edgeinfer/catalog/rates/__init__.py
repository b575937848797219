"""How fast this CPU computes each type of tensor, and what follows from it for a file."""
