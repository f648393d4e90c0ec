"""ControlledTarget generation by every method."""
