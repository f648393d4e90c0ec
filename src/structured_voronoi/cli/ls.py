"""`svs ls`: lists of models, samplers, targets, controls and experiments, without heavy imports."""

from __future__ import annotations

from structured_voronoi.controls import bundled_controls
from structured_voronoi.experiments import EXPERIMENTS
from structured_voronoi.samplers.registry import TEXT_SAMPLERS

MODELS = {
    "bundled": "restaurant descriptions, 1.1 M parameters; comes with the package",
    "smollm2": "SmolLM2-135M-Instruct; after `svs models get smollm2`",
    "NAME": "a causal language model of the Hugging Face hub, gpt2 for example",
    "FOLDER": "a model saved by `save_pretrained`, or by `svs train lm`",
    "FILE.gguf": "a GGUF file (needs the extra gguf)",
}
SAMPLERS = {
    "SVS": "structured Voronoi sampling by exact motion; open walls are exact for every target",
    "SVS.paper": "the paper's algorithm: leapfrog and a grid of discontinuity steps",
    "HMC": "plain Hamiltonian Monte Carlo on the Voronoi measure",
    "Langevin": "Langevin dynamics on the Voronoi measure, uncorrected by default",
    "MuCoLa": "Langevin steps projected to embeddings, uncorrected by default",
    "COLD": "Langevin dynamics on the logits of a soft text, made hard by the model; not exact",
    "PNCG": "norm-constrained gradient proposal with Metropolis; exact",
    "GibbsWithGradients": "one position at a time, proposed by the gradient; exact",
    "Refresh": "blocks of tokens redrawn from the language model; exact",
    "Cycle": "several samplers in turn",
    "Guided": "texts proposed with a lookahead, chosen by weight; exact",
    "SMC": "particles, with a lookahead or without (`SMC.bootstrap`); not exact with finitely many",
    "Ancestral": "each token given those before it; exact where nothing stands on the right",
    "Rejection": "drawn from the language model, accepted by the controls; exact",
    "Fudge": "each token weighed by a classifier of prefixes; not exact",
}
TARGETS = {
    "CategoricalTarget": "one token from a distribution over embedded elements, inside a box",
    "TabularTarget": "any table over [M]^N; its truth is known",
    "LanguageModel": "p(text | prompt) of the bundled model, a Hugging Face model or a GGUF file",
    "Controlled": "a language model under any number of controls",
    "PottsTarget": "the Potts and Ising models on a square lattice",
}
CONTROLS = {
    "keyword=WORDS": "a word or phrase, case-insensitive",
    "regex=PATTERN": "a regular expression that matches somewhere in the text",
    "words=5..12": "so many words, separated by spaces; one bound may be missing",
    "characters=..80": "so many characters",
    "only=WORD,WORD,…": "no words but these",
    "FOLDER=LABEL": "a classifier by `svs train classifier`, or a Hugging Face sequence classifier",
    "MODULE:FUNCTION": "a Python function of the text: True or False, or a probability",
    "not …": "the opposite of any of these but a classifier",
}


def ls() -> int:
    """List models, samplers, targets, controls and experiments."""
    lists = {
        "models": MODELS,
        "samplers": SAMPLERS,
        "samplers on the command line (svs sample --sampler NAME)": TEXT_SAMPLERS,
        "targets": TARGETS,
        "controls": {name: ", ".join(labels) for name, labels in bundled_controls().items()} | CONTROLS,
        "experiments": {name: experiment.about for name, experiment in EXPERIMENTS.items()},
    }
    for title, entries in lists.items():
        print(title)
        for name, about in entries.items():
            print(f"  {name:<20} {about}")
    return 0
