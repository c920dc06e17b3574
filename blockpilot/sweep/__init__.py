"""Rows of a sweep: by decoding every size, or by replaying all sizes from one answer."""
