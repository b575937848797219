"""Programs that run in processes of their own: the quantizer, perplexity, the devices."""
