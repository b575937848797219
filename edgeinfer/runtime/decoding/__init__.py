"""The decode loop: its step, the requests, what is remembered, and the guesses."""
