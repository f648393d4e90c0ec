"""Patterns and stop strings as automata over bytes and over the tokens of a vocabulary."""
