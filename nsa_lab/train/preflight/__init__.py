"""What is checked before the first step; a run that fails a check does not start."""
