"""What there is, by the names that the command line uses: plain words, so that `svs ls` answers at once."""

from __future__ import annotations

MODELS = {
    "bundled": "restaurant descriptions, 1.1 M parameters; comes with the package",
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
    "PNCG": "norm-constrained gradient proposal with Metropolis; exact",
    "GibbsWithGradients": "one position at a time, proposed by the gradient; exact",
    "Refresh": "blocks of tokens redrawn from the language model; exact",
    "Cycle": "several samplers in turn",
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
    "keyword=WORDS": "a word or phrase, in capitals or not",
    "regex=PATTERN": "a regular expression that matches somewhere in the text",
    "FOLDER=LABEL": "a classifier by `svs train classifier`, or a Hugging Face sequence classifier",
    "MODULE:FUNCTION": "a Python function of the text: True or False, or a probability",
    "not …": "the opposite of a keyword, a regex or a function",
}

TEXT_SCALE = 0.22
"""Of SVS on text where nothing else is asked for: docs/results.md, efficiency."""
TEXT_SAMPLERS = {
    "svs+refresh": "SVS and Refresh in turn; exact, the default",
    "rejection": "Rejection; exact, best where controls are not rare",
    "svs": "SVS alone; exact, finds what fits between neighbours",
    "refresh": "Refresh alone; exact",
    "ancestral": "Ancestral; exact where nothing stands on the right and nothing controls",
    "pncg": "PNCG; exact",
    "gwg": "GibbsWithGradients; exact",
    "svs-paper": "SVS.paper; not exact",
    "langevin": "Langevin; not exact",
    "mucola": "MuCoLa; not exact",
    "auto": "the exact one that costs least, found on a pilot",
}
"""What `svs sample --sampler` takes."""
INEXACT = ("svs-paper", "langevin", "mucola")
