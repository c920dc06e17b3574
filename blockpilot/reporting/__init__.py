"""Reporting: numbers and tables from records alone; loads no model."""
