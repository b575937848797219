"""What long work says while it goes on, and how it is told to stop; as words and as a bar."""
