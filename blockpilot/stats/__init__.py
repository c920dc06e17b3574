"""Tau, intervals, luck and oracles: pure functions of arrays and of rows."""
