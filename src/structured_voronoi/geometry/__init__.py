"""Pure tensors: Voronoi cells, crossing times, motion between walls, cell masses."""
