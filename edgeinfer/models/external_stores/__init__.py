"""Use models in other programs' stores in place; nothing is ever written there."""
