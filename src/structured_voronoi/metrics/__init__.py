"""Functions from arrays to numbers."""
