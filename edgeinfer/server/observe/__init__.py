"""What the endpoint says of itself: logs, metrics, traces, the payload log."""
