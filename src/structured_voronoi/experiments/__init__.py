"""The paper's experiments and ours, one file each. This list is read without importing any of them."""

EXPERIMENTS = {
    "toy": "four cells in the plane: trajectory, JS divergence by temperature, iterations, elements",
    "hypercube": "2^k cells in R^k: JS divergence by dimension",
    "lm": "perplexities of texts of every sampler beside ancestral ones, on the bundled model",
    "faithfulness": "SVS and its broken twins against enumerated truth; energy error and round trips",
    "crossings": "the exact crossing finder against the paper's α grid on the same trajectories",
}
