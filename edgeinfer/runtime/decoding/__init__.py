"""The decode loop: `scheduling` its step, `sequences` the requests, `cache` and `blocks` what is
remembered, `drafting` the guesses.
"""
