"""What the endpoint says of itself: logs, metrics, the payload log."""
