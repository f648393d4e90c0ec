"""Exact samplers, one file each; registry.py is the list of all samplers."""
