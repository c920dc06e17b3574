"""Predictors and policies against the best fixed size, on unseen prompts."""
