"""Controlled generation by every method."""
