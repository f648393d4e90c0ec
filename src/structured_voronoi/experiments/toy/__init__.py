"""The paper's toy and its hypercube."""
