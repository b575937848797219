"""Sources become partial files, one module a kind of place. Nothing here decides that one is right."""
