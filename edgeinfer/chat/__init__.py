"""The chat without a screen: a session, its commands, and the plain front end."""
