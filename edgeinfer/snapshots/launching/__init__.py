"""The launcher's side: start an app, supervise it, hold its terminal. Stdlib only."""
