"""Pictures and documents: processes with limits convert them to pixels and text."""
