"""The optimizer of the plugin."""
