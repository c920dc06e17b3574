"""Training of drafters from the target's own responses."""
