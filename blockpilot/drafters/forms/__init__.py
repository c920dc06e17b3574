"""Checkpoints in their published forms: config.json and tensors, never code."""
