"""Policies: what picks the block size, once per prompt or per cycle."""
