"""Diagnostics of a run: convergence, weights, warnings, summaries and plots."""
