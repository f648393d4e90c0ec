"""Comparisons of samplers of text."""
