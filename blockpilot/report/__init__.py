"""Tables and figures from records alone."""
