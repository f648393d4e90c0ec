"""The paper's experiments and ours, one file each. This list is read without importing any of them."""

EXPERIMENTS = {
    "toy": "four cells in the plane: trajectory, JS divergence by temperature, iterations, elements",
    "hypercube": "2^k cells in R^k: JS divergence by dimension",
    "lm": "perplexities of texts of every sampler beside ancestral ones",
    "truth": "samplers of text against the bundled model over few tokens, every text listed",
    "mixing": "SVS with refresh moves from ancestral texts and from random tokens",
    "efficiency": "samplers of text after the same cost; guidance and dimensions",
    "topic": "restaurant reviews of seven kinds of food (E2E) by every method, beside exact rejection; needs --data",
    "sentiment": "positive phrases (SST-2) by every method: a smoke test on a small model; needs --data",
    "combined": "three controls at once, and a regular expression alone, beside exact rejection",
    "faithfulness": "SVS and its broken twins against enumerated truth; energy error and round trips",
    "crossings": "the exact crossing finder against the paper's α grid on the same trajectories",
}

WITH_DATA = {
    "lm": "",
    "mixing": "",
    "efficiency": "",
    "topic": "trainset.csv",
    "sentiment": "train.tsv",
    "combined": "trainset.csv",
}
"""Experiments that can run on a language model trained on the user's texts, and the file their folder must hold."""

NEED_DATA = ("topic", "sentiment")
"""Experiments that cannot do without."""
