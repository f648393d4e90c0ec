"""Geometry on plain tensors: Voronoi cells, crossing times, motion between walls, cell masses."""
