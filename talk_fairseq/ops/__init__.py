"""The operator: its call, the backends that compute it, and its decoding state."""
