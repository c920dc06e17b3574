"""Training of drafters from what their target itself says."""
