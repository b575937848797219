"""The restored process: run a verb, renew state that every restore repeats, release idle memory."""
