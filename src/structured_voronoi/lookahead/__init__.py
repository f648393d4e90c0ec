"""A learned guess of what a prefix will come to, and the proposals that follow it."""
