"""How exact the samplers are, in numbers."""
