"""Targets bound for sampling: evaluation in bounded memory, geometry, redraws and starts."""
