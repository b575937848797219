"""An engine in another process: its client here, its server there, one socket between them."""
