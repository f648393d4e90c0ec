"""Metrics: functions from arrays to numbers."""
