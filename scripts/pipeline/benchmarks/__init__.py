"""Speed and memory of the operator, of training steps and of decoding."""
