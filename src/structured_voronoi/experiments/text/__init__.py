"""Samplers of text beside each other."""
