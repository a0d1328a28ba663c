"""The training loop: from `prepare` to the step, and what the user calls between them."""
