"""`svs train`: train language models and classifiers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from structured_voronoi.cli import WHOLE
from structured_voronoi.cli.options import check_resume
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.validation import check_seed

OUTPUT_NAMES = ("model", "config", "tokenizer", "generation_config", "training", "new")
"""Beginnings of the names of the files that a training writes."""
Seed = Annotated[int, WHOLE, Parameter(help="Seed of all random numbers.")]
Checkpoint = Annotated[
    Path | None,
    Parameter(
        help="Checkpoint folder. Without it the checkpoint is in --out, and the same command resumes an interrupted "
        "training."
    ),
]
Resume = Annotated[bool, Parameter(help="Resume the training in --checkpoint, if there is one.", negative="")]


def train_lm(
    *,
    data: Annotated[
        str, Parameter(help="`builtin`, a folder with trainset.csv and devset.csv, a .csv file, or a text file.")
    ],
    out: Annotated[Path, Parameter(help="Folder for the model, in the format of Hugging Face.")],
    base: Annotated[
        str | None, Parameter(help="Fine-tune the last layers of this model; as --model of `svs sample`.")
    ] = None,
    epochs: Annotated[float, Parameter(help="Passes over the texts.")] = 1.0,
    minutes: Annotated[
        float | None, Parameter(help="With --base: train for at most so many minutes; default 40.", show_default=False)
    ] = None,
    seed: Seed = 0,
    half: Annotated[bool, Parameter(help="Save float16 weights.")] = False,
    checkpoint: Checkpoint = None,
    resume: Resume = False,
) -> int:
    """Train a small GPT-2 with its own tokenizer, or fine-tune a model.

    Example: svs train lm --data builtin --out my-model

    Example: svs train lm --base smollm2 --data reviews.txt --out my-model
    """
    check_seed(seed)
    check_resume(resume, checkpoint)
    _check_below(1000, epochs=epochs)
    if minutes is not None and base is None:
        raise SamplingError(
            f"{minutes:g} applies to fine-tuning only",
            argument="minutes",
            remedy="give a base model, for example smollm2, or leave the minutes out",
        )
    _check_below(100_000, minutes=minutes)

    from structured_voronoi.core.progress import progress_bar
    from structured_voronoi.models.corpora import load_corpus
    from structured_voronoi.models.folders import writable_folder
    from structured_voronoi.models.training_run import TrainingCheckpoint

    corpus, folder = load_corpus(data), writable_folder(out, OUTPUT_NAMES)
    saved = TrainingCheckpoint(checkpoint, resume or checkpoint is None)
    if base is None:
        from structured_voronoi.models.training import TrainingSettings, train_language_model

        settings = TrainingSettings(epochs=epochs, seed=seed)
        with progress_bar(settings.steps(len(corpus.train)), show=True, stage="training") as tick:
            report = train_language_model(corpus, folder, settings, tick, half, saved)
        print(
            f"{folder}: held-out perplexity {report['held_out_perplexity']:.2f} per token ({report['texts']:,} texts)"
        )
        return 0

    from structured_voronoi.models.fine_tuning import FINE_TUNING_TICKS, FineTuningSettings, fine_tune

    with progress_bar(FINE_TUNING_TICKS, show=True, label="fine-tuning", stage="training") as tick:
        tuning = FineTuningSettings(base, minutes=40.0 if minutes is None else minutes, epochs=epochs, seed=seed)
        report = fine_tune(corpus, folder, tuning, tick, half, saved)
    print(
        f"{folder}: held-out loss {report['held_out_loss_before']:.3f} → {report['held_out_loss']:.3f} nats per token, "
        f"perplexity {report['held_out_perplexity']:.2f} ({report['texts']:,} texts in {report['minutes_taken']:.0f} "
        "minutes)"
    )
    return 0


def train_classifier(
    *,
    data: Annotated[str, Parameter(help="A .csv or .tsv file with a header, or `builtin`.")],
    label: Annotated[str, Parameter(help="Column of the labels; for the built-in texts food, price, area, ….")],
    text: Annotated[str, Parameter(help="Column of the texts.")] = "text",
    out: Annotated[Path, Parameter(help="Folder for the classifier; its name becomes the control's name.")],
    model: Annotated[
        str | None,
        Parameter(help="Language model to control, as in `svs sample`; with --kind encoder, the encoder."),
    ] = None,
    kind: Annotated[
        Literal["light", "probe", "encoder"],
        Parameter(
            help="`light`: on token embeddings; steers sampling. `probe`: a BiLSTM on hidden states. `encoder`: "
            "fine-tuned minilm (`svs models get minilm`); the most accurate, for any language model, but does not "
            "steer."
        ),
    ] = "light",
    epochs: Annotated[
        float | None, Parameter(help="Passes over the texts; default four, or more for few texts.")
    ] = None,
    limit: Annotated[int | None, WHOLE, Parameter(help="Maximum number of texts.")] = None,
    seed: Seed = 0,
    device: Annotated[str, Parameter(help="Torch device: cpu, cuda, ….")] = "cpu",
    checkpoint: Checkpoint = None,
    resume: Resume = False,
) -> int:
    """Train a classifier on labelled texts; use it with `svs sample --control FOLDER=LABEL`.

    Example: svs train classifier --data reviews.csv --text review --label mood --out ./mood
    """
    from structured_voronoi.core.progress import progress_bar

    check_seed(seed)
    check_resume(resume, checkpoint)
    _check_below(10_000, epochs=epochs)
    if kind == "encoder" and checkpoint is not None:
        raise SamplingError(
            "an encoder's training cannot be resumed", remedy="leave the checkpoint out, or choose another kind"
        )
    model = model or ("minilm" if kind == "encoder" else "bundled")
    with progress_bar(1, show=True, label=f"loading {model}", stage="loading"):  # the imports alone take seconds
        from structured_voronoi.models.classifier_training import train_classifier
        from structured_voronoi.models.classifiers import ClassifierSettings
        from structured_voronoi.models.corpora import labelled_texts
        from structured_voronoi.models.encoder_judge import EncoderSettings, train_encoder
        from structured_voronoi.models.folders import writable_folder
        from structured_voronoi.models.labels import check_labels
        from structured_voronoi.models.loading import load_model
        from structured_voronoi.models.training_run import TrainingCheckpoint

        texts, labels = labelled_texts(data, text, label, limit)
        check_labels(labels)
        folder = writable_folder(out, OUTPUT_NAMES)
        if kind != "encoder":
            loaded = load_model(model, device)
    if kind == "encoder":
        encoder = EncoderSettings(model, epochs or 4.0, seed=seed)
        with progress_bar(encoder.steps(len(texts)), show=True, label="fine-tuning", stage="training") as tick:
            report = train_encoder(texts, labels, folder, encoder, tick)
    else:
        settings = ClassifierSettings(kind=kind, epochs=epochs, seed=seed)
        saved = TrainingCheckpoint(checkpoint, resume or checkpoint is None)
        with progress_bar(settings.steps(len(texts)), show=True, stage="training") as tick:
            report = train_classifier(texts, labels, loaded, folder, settings, tick, saved)
    _print_report(folder, report)
    return 0


def _print_report(folder: Path, report: dict[str, Any]) -> None:
    """Print a classifier's scores on the held-out texts."""
    from rich.console import Console
    from rich.table import Table

    from structured_voronoi.models.classifier_training import SHORT_TEXT_F1, SHORT_TEXT_TOKENS

    table = Table("label", "precision", "recall", "F1", "held-out texts")
    for name, scores in report["classes"].items():
        table.add_row(name, *(f"{scores[key]:.3f}" for key in ("precision", "recall", "f1")), str(scores["count"]))
    Console(width=None if sys.stdout.isatty() else 120, markup=False, emoji=False).print(table)
    short = f" ({report[SHORT_TEXT_F1]:.3f} cut to {SHORT_TEXT_TOKENS} tokens)" if SHORT_TEXT_F1 in report else ""
    print(
        f"{folder}: macro-F1 {report['macro_f1']:.3f} on {report['held_out_texts']:,} held-out texts{short}; "
        f"{report['parameters']:,} parameters"
    )


def _check_below(limit: float, **values: float | None) -> None:
    """Raise an error for an argument that is given but is not a positive number below the limit."""
    for name, value in values.items():
        if value is not None and not 0 < value < limit:
            raise SamplingError(
                f"{value:g} is not a positive number below {limit:,}", argument=name, remedy="choose one, for example 4"
            )
