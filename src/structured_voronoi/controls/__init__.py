"""What the text must be."""
