"""Records: what was measured, one row per prompt and method, kept so that nothing is lost."""
