"""What is sampled."""
