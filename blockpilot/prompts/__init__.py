"""Prompt sets: where prompts come from, their format, and which split they belong to."""
