"""Checkpoint folders, files of lines, locks, and data as bytes."""
