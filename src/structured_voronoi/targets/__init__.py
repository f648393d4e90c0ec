"""Targets: the distributions that are sampled."""
