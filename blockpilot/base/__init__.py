"""What everything stands on: errors, files, paths, devices, and who made a result."""
