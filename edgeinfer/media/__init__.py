"""Pictures and documents, which sandboxed processes convert to pixels and text."""
