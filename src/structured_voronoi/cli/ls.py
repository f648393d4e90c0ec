"""`svs ls`: lists of models, samplers, targets, controls and experiments, without heavy imports."""

from __future__ import annotations

from structured_voronoi.controls import bundled_controls
from structured_voronoi.experiments import EXPERIMENTS
from structured_voronoi.samplers.registry import SAMPLERS

MODELS = {
    "bundled": "restaurant descriptions, 1.1 M parameters; comes with the package",
    "smollm2": "SmolLM2-135M-Instruct; after `svs models get smollm2`",
    "NAME": "a causal language model of the Hugging Face hub, gpt2 for example",
    "FOLDER": "a model saved by `save_pretrained`, or by `svs train lm`",
    "FILE.gguf": "a GGUF file (needs the extra gguf)",
}
TARGETS = {
    "TextTarget": "texts of a language model after a prompt; made by model.target(prompt)",
    "ControlledTarget": "texts under controls; made by model.target(prompt, controls)",
    "CategoricalTarget": "one token from a distribution over embedded elements, inside a box",
    "TabularTarget": "any table over [M]^N",
    "PottsTarget": "the Potts and Ising models on a square lattice",
}
CONTROLS = {
    "keyword=WORDS": "a word or phrase, in upper or lower case",
    "regex=PATTERN": "a regular expression that matches somewhere in the text",
    "words=5..12": "the number of words; one bound may be missing",
    "characters=..80": "the number of characters",
    "only=WORD,WORD,…": "no other words than these",
    "FOLDER=LABEL": "a classifier by `svs train classifier`, or a Hugging Face sequence classifier",
    "MODULE:FUNCTION": "a Python function of the text: True or False, or a probability",
    "not …": "the opposite of any of these but a classifier",
}


def ls() -> int:
    """List models, samplers, targets, controls and experiments."""
    lists = {
        "models": MODELS,
        "samplers (* for svs sample --sampler)": {
            entry.name + (" *" if entry.for_text else ""): f"{entry.class_name}: {entry.help}"
            + ("" if entry.exact else " (not exact)")
            for entry in SAMPLERS
        },
        "targets": TARGETS,
        "controls": {name: ", ".join(labels) for name, labels in bundled_controls().items()} | CONTROLS,
        "experiments": {name: experiment.about for name, experiment in EXPERIMENTS.items()},
    }
    for title, entries in lists.items():
        print(title)
        for name, about in entries.items():
            print(f"  {name:<20} {about}")
    return 0
