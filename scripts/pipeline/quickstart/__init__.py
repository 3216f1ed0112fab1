"""The quick starts."""
