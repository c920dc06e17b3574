"""What a cycle costs: measured curves and their fits."""
