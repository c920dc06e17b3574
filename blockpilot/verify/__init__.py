"""Verifiers: one target forward per cycle decides what is committed."""
