"""How to sample: one file a sampler."""
