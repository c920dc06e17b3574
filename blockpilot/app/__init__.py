"""What surrounds a stage: configuration, one run of a job, launching, tracking."""
