"""The paper's toy and hypercube experiments."""
