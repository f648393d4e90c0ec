"""The experiments of the paper and of this package.

Each is a module with a frozen dataclass `Settings` and a function `run(settings, out)` that returns the files it wrote.
This list can be read without importing them.
"""

from __future__ import annotations

from typing import NamedTuple


class Experiment(NamedTuple):
    """An entry in the list of experiments."""

    module: str
    about: str
    takes_data: bool = False
    """Whether it can train a language model on the user's texts."""
    data_file: str | None = None
    """File that the user's folder must contain."""
    needs_data: bool = False
    """Whether it cannot run without the user's texts."""
    takes_model: bool = False
    """Whether it can use a pretrained language model instead."""


EXPERIMENTS = {
    "toy": Experiment(
        "toy.toy", "four cells in the plane: trajectory, JS divergence by temperature, iterations, elements"
    ),
    "hypercube": Experiment("toy.hypercube", "2^k cells in R^k: JS divergence by dimension"),
    "lm": Experiment("text.lm", "perplexities of texts of every sampler and of ancestral sampling", takes_data=True),
    "truth": Experiment(
        "exactness.truth",
        "samplers of text compared with an enumerated distribution of the bundled model",
    ),
    "mixing": Experiment(
        "text.mixing",
        "mixing of SVS with refresh moves, from ancestral texts and from random tokens",
        takes_data=True,
    ),
    "efficiency": Experiment(
        "text.efficiency",
        "samplers of text at equal cost; guidance and dimensions of SVS",
        takes_data=True,
    ),
    "topic": Experiment(
        "control.topic",
        "restaurant reviews of seven foods (E2E) by every method, compared with exact rejection; needs --data",
        takes_data=True,
        data_file="trainset.csv",
        needs_data=True,
        takes_model=True,
    ),
    "sentiment": Experiment(
        "control.sentiment",
        "positive texts (SST-2) by every method, best with --model smollm2; needs --data",
        takes_data=True,
        data_file="train.tsv",
        needs_data=True,
        takes_model=True,
    ),
    "combined": Experiment(
        "control.combined",
        "three controls together, and a regular expression, compared with exact rejection",
        takes_data=True,
        data_file="trainset.csv",
    ),
    "rare": Experiment(
        "control.rare",
        "cost per text of every method under controls with probabilities from 1e-1 to 1e-7",
        takes_data=True,
        data_file="trainset.csv",
    ),
    "faithfulness": Experiment(
        "exactness.faithfulness",
        "SVS and broken variants on enumerated targets; energy error and round trips",
    ),
    "crossings": Experiment(
        "exactness.crossings", "the exact crossing finder compared with the paper's α grid on the same trajectories"
    ),
}
