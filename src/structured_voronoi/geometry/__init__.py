"""Voronoi cells, crossing times, exact motion and cell masses, on plain tensors."""
