"""Checks of finished and running jobs: convergence, weights, summaries and plots."""
