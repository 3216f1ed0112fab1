"""Pictures of training runs and of windows."""
