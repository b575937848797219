"""Devices for a model that runs on the CPU: attached while it computes, left when they fail."""
