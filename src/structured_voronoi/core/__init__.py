"""Contracts, errors, random streams, progress and validation: what every room uses."""
