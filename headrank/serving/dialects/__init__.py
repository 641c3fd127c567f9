"""One file a dialect: what its clients send, and what they expect back."""
