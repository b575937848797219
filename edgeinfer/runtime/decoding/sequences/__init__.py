"""One request inside the engine: its tokens, its sampler, and its way to the consumer."""
