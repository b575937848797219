"""The restored process: run a verb, renew state that a restore repeats, release idle memory."""
