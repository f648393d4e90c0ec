"""The paper's experiments and ours, one module each: a frozen `Settings` and `run(settings, out) -> files written`.

This list is read without importing any of them.
"""

from __future__ import annotations

from typing import NamedTuple


class Experiment(NamedTuple):
    """Where an experiment is and what it is about."""

    module: str
    about: str
    takes_data: bool = False
    """Can it run on a language model trained on the user's texts?"""
    data_file: str | None = None
    """What the user's folder must hold."""
    needs_data: bool = False
    takes_model: bool = False
    """Can it run on a pretrained language model instead?"""


EXPERIMENTS = {
    "toy": Experiment(
        "toy.toy", "four cells in the plane: trajectory, JS divergence by temperature, iterations, elements"
    ),
    "hypercube": Experiment("toy.hypercube", "2^k cells in R^k: JS divergence by dimension"),
    "lm": Experiment("text.lm", "perplexities of texts of every sampler beside ancestral ones", takes_data=True),
    "truth": Experiment(
        "exactness.truth", "samplers of text against the bundled model over few tokens, every text listed"
    ),
    "mixing": Experiment(
        "text.mixing", "SVS with refresh moves from ancestral texts and from random tokens", takes_data=True
    ),
    "efficiency": Experiment(
        "text.efficiency", "samplers of text after the same cost; guidance and dimensions", takes_data=True
    ),
    "topic": Experiment(
        "control.topic",
        "restaurant reviews of seven kinds of food (E2E) by every method, beside exact rejection; needs --data",
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
        "three controls at once, and a regular expression alone, beside exact rejection",
        takes_data=True,
        data_file="trainset.csv",
    ),
    "rare": Experiment(
        "control.rare",
        "controls met by one text in ten to one in ten million: what a text costs by every method, and a race",
        takes_data=True,
        data_file="trainset.csv",
    ),
    "faithfulness": Experiment(
        "exactness.faithfulness", "SVS and its broken twins against enumerated truth; energy error and round trips"
    ),
    "crossings": Experiment(
        "exactness.crossings", "the exact crossing finder against the paper's α grid on the same trajectories"
    ),
}
