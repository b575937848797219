"""Use models in other programs' stores where they are; nothing there is ever written."""
