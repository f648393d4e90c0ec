"""`svs train`: language models and classifiers of one's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from structured_voronoi.cli import WHOLE
from structured_voronoi.cli.options import check_resume
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.validation import check_seed

WRITTEN = ("model", "config", "tokenizer", "generation_config", "training", "new")
"""How the names of the files begin that a training writes: folders that are called so are in the way."""
Seed = Annotated[int, WHOLE, Parameter(help="Seed of all random streams.")]
Unfinished = Annotated[
    Path | None,
    Parameter(
        help="Folder in which what is unfinished is kept. Without it that is a folder in --out, and the same command "
        "goes on by itself after it was stopped."
    ),
]
Resume = Annotated[bool, Parameter(help="Go on with the training in --checkpoint, if there is one.", negative="")]


def train_lm(
    *,
    data: Annotated[
        str, Parameter(help="`builtin`, a folder with trainset.csv and devset.csv, a .csv, or a text file.")
    ],
    out: Annotated[Path, Parameter(help="Folder for the model, as Hugging Face reads it.")],
    base: Annotated[
        str | None, Parameter(help="Fine-tune the last layers of this model instead; as --model of `svs sample`.")
    ] = None,
    epochs: Annotated[float, Parameter(help="Passes over the texts.")] = 1.0,
    minutes: Annotated[
        float | None, Parameter(help="With --base: train for so long at most; 40 if left out.", show_default=False)
    ] = None,
    seed: Seed = 0,
    half: Annotated[bool, Parameter(help="Store float16 weights.")] = False,
    checkpoint: Unfinished = None,
    resume: Resume = False,
) -> int:
    """Train a small GPT-2 with a tokenizer of its own, or fine-tune a model; run the same command again to go on.

    Example: svs train lm --data builtin --out my-model

    Example: svs train lm --base smollm2 --data reviews.txt --out my-model
    """
    check_seed(seed)
    check_resume(resume, checkpoint)
    resume = resume or checkpoint is None
    if not 0 < epochs < 1000:
        raise SamplingError(f"--epochs {epochs}: choose a positive number, 1 for example")
    if minutes is not None and base is None:
        raise SamplingError(
            f"--minutes {minutes:g} is for fine-tuning",
            remedy="add --base smollm2 for example, or leave it out",
        )
    if minutes is not None and not 0 < minutes < 100_000:
        raise SamplingError(f"--minutes {minutes:g}: choose a positive number, 40 for example")

    from structured_voronoi.core.progress import progress_bar
    from structured_voronoi.models.corpora import load_corpus
    from structured_voronoi.models.folders import writable_folder

    corpus, folder = load_corpus(data), writable_folder(out, WRITTEN)
    if base is None:
        from structured_voronoi.models.training import Recipe, train_language_model

        recipe = Recipe(epochs=epochs, seed=seed)
        with progress_bar(recipe.steps(len(corpus.train)), show=True, label="training") as tick:
            report = train_language_model(corpus, folder, recipe, tick, half, checkpoint, resume)
        print(f"{folder}: held-out perplexity {report['held_out_perplexity']:.2f} a token ({report['texts']:,} texts)")
        return 0

    from structured_voronoi.models.fine_tuning import TICKS, FineTuning, fine_tune

    plan = (
        FineTuning(base, epochs=epochs, seed=seed) if minutes is None else FineTuning(base, minutes, epochs, seed=seed)
    )
    with progress_bar(TICKS, show=True, label="fine-tuning") as tick:
        report = fine_tune(corpus, folder, plan, tick, half, checkpoint, resume)
    print(
        f"{folder}: held-out loss {report['held_out_loss_before']:.3f} → {report['held_out_loss']:.3f} nats a token, "
        f"perplexity {report['held_out_perplexity']:.2f} ({report['texts']:,} texts in {report['minutes_taken']:.0f} "
        "minutes)"
    )
    return 0


def train_classifier(
    *,
    data: Annotated[str, Parameter(help="A .csv or .tsv file with a header, or `builtin`.")],
    label: Annotated[str, Parameter(help="Column of the labels; for the built-in texts food, price, area, ….")],
    text: Annotated[str, Parameter(help="Column of the texts.")] = "text",
    out: Annotated[Path, Parameter(help="Folder for the classifier; its name becomes the control's.")],
    model: Annotated[
        str | None,
        Parameter(help="The language model it will control, as for `svs sample`; with --kind encoder, the encoder."),
    ] = None,
    kind: Annotated[
        Literal["light", "probe", "encoder"],
        Parameter(
            help="`light`: on the model's embeddings; it steers. `probe`: a BiLSTM on its hidden states. `encoder`: "
            "minilm, fine-tuned (`svs models get minilm`); it judges best, for any language model, and does not steer."
        ),
    ] = "light",
    epochs: Annotated[float | None, Parameter(help="Passes over the texts; four or more if left out.")] = None,
    limit: Annotated[int | None, WHOLE, Parameter(help="Read no more texts than this.")] = None,
    seed: Seed = 0,
    device: Annotated[str, Parameter(help="cpu, cuda, …")] = "cpu",
    checkpoint: Unfinished = None,
    resume: Resume = False,
) -> int:
    """Train a control from labelled texts of your own; use it with `svs sample --control FOLDER=LABEL`.

    Example: svs train classifier --data reviews.csv --text review --label mood --out ./mood
    """
    from structured_voronoi.core.progress import progress_bar

    check_seed(seed)
    check_resume(resume, checkpoint)
    resume = resume or checkpoint is None
    if epochs is not None and not 0 < epochs < 10_000:
        raise SamplingError(f"--epochs {epochs}: choose a positive number, 4 for example")
    if kind == "encoder" and checkpoint is not None:
        raise SamplingError(
            "--checkpoint does not go with --kind encoder, whose training begins anew",
            remedy="leave it out",
        )
    model = model or ("minilm" if kind == "encoder" else "bundled")
    with progress_bar(1, show=True, label=f"loading {model}"):  # the imports alone take seconds
        from structured_voronoi.models.classifier_training import SHORT, SHORT_F1, check_labels, train_classifier
        from structured_voronoi.models.classifiers import ClassifierRecipe
        from structured_voronoi.models.corpora import labelled_texts
        from structured_voronoi.models.encoder_judge import EncoderRecipe, train_encoder
        from structured_voronoi.models.folders import writable_folder
        from structured_voronoi.models.loading import load_model

        labelled = labelled_texts(data, text, label, limit)
        check_labels(labelled.labels)
        folder = writable_folder(out, WRITTEN)
        if kind != "encoder":
            recipe = ClassifierRecipe(kind=kind, epochs=epochs, seed=seed)
            loaded = load_model(model, device)
    if kind == "encoder":
        encoder = EncoderRecipe(model, epochs or 4.0, seed=seed)
        with progress_bar(encoder.steps(len(labelled.texts)), show=True, label="fine-tuning") as tick:
            report = train_encoder(labelled.texts, labelled.labels, folder, encoder, tick)
    else:
        with progress_bar(recipe.steps(len(labelled.texts)), show=True, label="training") as tick:
            report = train_classifier(labelled.texts, labelled.labels, loaded, folder, recipe, tick, checkpoint, resume)

    from rich.console import Console
    from rich.table import Table

    grid = Table("label", "precision", "recall", "F1", "held-out texts")
    for name, scores in report["classes"].items():
        grid.add_row(name, *(f"{scores[key]:.3f}" for key in ("precision", "recall", "f1")), str(scores["count"]))
    Console(width=None if sys.stdout.isatty() else 120, markup=False, emoji=False).print(grid)
    short = f" ({report[SHORT_F1]:.3f} cut to {SHORT} tokens)" if SHORT_F1 in report else ""
    print(
        f"{folder}: macro-F1 {report['macro_f1']:.3f} on {report['held_out_texts']:,} held-out texts{short}; "
        f"{report['parameters']:,} parameters"
    )
    return 0
