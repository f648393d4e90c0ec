"""The command `svs`. Heavy imports happen inside the commands, so that `svs --help` answers at once."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from structured_voronoi.catalogue import CONTROLS, INEXACT, MODELS, SAMPLERS, TARGETS, TEXT_SAMPLERS, TEXT_SCALE
from structured_voronoi.experiments import EXPERIMENTS, NEED_DATA, WITH_DATA

if TYPE_CHECKING:
    from structured_voronoi.base import Control

app = App(
    name="svs",
    help="""Draw samples under control, and prove that they follow the distribution they should.

    Start with `svs verify`, which checks every sampler against known truth, or `svs reproduce toy`, which draws the
    paper's toy figures into ./results.""",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=()),
)

Out = Annotated[Path, Parameter(help="Folder for NAME.json, NAME.md and pictures.")]
Seed = Annotated[int, Parameter(help="Seed of all random streams.")]


@app.command
def sample(
    *,
    model: Annotated[str, Parameter(help="`bundled`, a Hugging Face hub name, a folder, or a .gguf file.")] = "bundled",
    prompt: Annotated[str, Parameter(help="Text on the left.")] = "",
    suffix: Annotated[str, Parameter(help="Text on the right: the model fills the gap.")] = "",
    length: Annotated[int, Parameter(help="Tokens of each text.")] = 20,
    ends: Annotated[bool, Parameter(help="Complete texts: weigh by the probability of the end.")] = False,
    n: Annotated[int, Parameter(name="-n", help="Texts, each from a chain of its own.")] = 8,
    sampler: Annotated[str, Parameter(help=f"One of {', '.join(TEXT_SAMPLERS)}.")] = "svs+refresh",
    scale: Annotated[
        float | Literal["auto"],
        Parameter(help="Width of SVS in nearest-neighbour distances; `auto` tunes it on pilot chains."),
    ] = TEXT_SCALE,
    warmup: Annotated[
        int | None,
        Parameter(help="Steps of each chain before its text: none where chains start at the truth, else 100."),
    ] = None,
    thin: Annotated[int, Parameter(help="Further steps to the text.")] = 1,
    start: Annotated[Literal["ancestral", "random"], Parameter(help="Where chains start.")] = "ancestral",
    seed: Seed = 0,
    control: Annotated[
        list[str] | None,
        Parameter(
            help="What texts must be; repeatable. food=Italian (see `svs ls`), keyword=river, regex=^The, "
            "./folder=label, module:function, or `not keyword=river`; a weight may follow: food=Italian@1.5."
        ),
    ] = None,
    out: Annotated[Path | None, Parameter(help="JSONL file, one line a text.")] = None,
    device: Annotated[str, Parameter(help="cpu, cuda, …")] = "cpu",
    dtype: Annotated[str, Parameter(help="float32, float64, bfloat16 or float16.")] = "float32",
) -> int:
    """Draw texts from a language model, under control if you like; they appear as they come.

    Example: svs sample -n 4 --length 24 --prompt "Near the old bridge" --control food=Italian --out texts.jsonl
    """
    import json

    from structured_voronoi.base import SamplingError, did_you_mean, is_independent

    for name, value, least in (("-n", n, 1), ("--warmup", warmup or 0, 0), ("--thin", thin, 1)):
        if value < least:
            raise SamplingError(f"{name} {value} is too small; use {least} or more")
    _check_seed(seed)
    if sampler not in TEXT_SAMPLERS:
        raise SamplingError(f"unknown sampler {sampler!r}; {did_you_mean(sampler, TEXT_SAMPLERS)}")
    controls: dict[Control, float] = {}
    if control:
        from structured_voronoi.controls.parsing import parse_control

        controls = dict(parse_control(written, device) for written in control)
    _check_writable(out)

    from structured_voronoi.run.texts import Batch, closing_line, draw_texts
    from structured_voronoi.samplers.choices import text_sampler
    from structured_voronoi.samplers.choosing import choose
    from structured_voronoi.targets.controlled import Controlled
    from structured_voronoi.targets.language_model import LanguageModel

    language_model = LanguageModel.load(
        model, prompt=prompt, length=length, suffix=suffix, ends=ends, device=device, dtype=dtype
    )
    target = Controlled(language_model, controls) if controls else language_model
    left_out = ", ".join(f"{count} {why}" for why, count in language_model.excluded.items() if count)
    print(f"svs: tokens left out: {left_out or 'none'}", file=sys.stderr)
    at_truth = target.normalised and start == "ancestral" and sampler not in INEXACT
    if warmup is None:
        warmup = 0 if at_truth else 100
    if sampler == "auto":
        sampler, why = choose(target, seed, warmup + thin, scale)
        print(f"svs: {why}", file=sys.stderr)
    chosen, batches = text_sampler(sampler, scale, target.embeddings.shape[1]), list[Batch]()
    steps = 1 if is_independent(chosen) else warmup + thin
    with contextlib.ExitStack() as stack:
        for batch in draw_texts(target, chosen, n, steps, seed, start, progress=True):
            if out is not None and not batches:  # what is in the file stays until there is something to write
                file = stack.enter_context(out.open("w", encoding="utf-8"))
            batches.append(batch)
            for text in batch.texts:
                print(text.text, flush=True)
                if out is not None:
                    file.write(json.dumps(text.line(), ensure_ascii=False, allow_nan=False) + "\n")
                    file.flush()
    said = closing_line(batches, length, is_independent(chosen), at_truth)
    print(f"svs: {said}{' This sampler is not exact.' if sampler in INEXACT else ''}", file=sys.stderr)
    return 0


def _check_seed(seed: int) -> None:
    if seed < 0:
        from structured_voronoi.base import SamplingError

        raise SamplingError(f"--seed {seed} is negative; use 0 or more")


def _check_writable(path: Path | None) -> None:
    """Can the file be written? Asked before the long work, which leaves it as it is."""
    if path is None:
        return
    is_new = not path.exists()
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        from structured_voronoi.base import SamplingError

        raise SamplingError(f"--out {path} cannot be written ({error.strerror}); choose another file") from error


train = App(name="train", help="Train models of your own.")
app.command(train)


@train.command(name="lm")
def train_lm(
    *,
    data: Annotated[
        str, Parameter(help="`builtin`, a folder with trainset.csv and devset.csv, a .csv, or a text file.")
    ],
    out: Annotated[Path, Parameter(help="Folder for the model, as Hugging Face reads it.")],
    epochs: Annotated[float, Parameter(help="Passes over the texts.")] = 1.0,
    seed: Seed = 0,
    half: Annotated[bool, Parameter(help="Store float16 weights.")] = False,
) -> int:
    """Train a small GPT-2 with a tokenizer of its own; run the same command again to go on after a stop.

    Example: svs train lm --data builtin --out my-model
    """
    from structured_voronoi.base import SamplingError
    from structured_voronoi.experiments.report import writable_folder
    from structured_voronoi.models.corpora import load_corpus
    from structured_voronoi.models.training import Recipe, train_language_model
    from structured_voronoi.run.progress import progress_bar

    _check_seed(seed)
    if not 0 < epochs < 1000:
        raise SamplingError(f"--epochs {epochs}: choose a positive number, 1 for example")
    corpus, recipe = load_corpus(data), Recipe(epochs=epochs, seed=seed)
    folder = writable_folder(out)
    with progress_bar(recipe.steps(len(corpus.train)), show=True, what="training") as tick:
        report = train_language_model(corpus, folder, recipe, tick, half)
    print(f"{folder}: held-out perplexity {report['held_out_perplexity']:.2f} a token ({report['texts']:,} texts)")
    return 0


@train.command(name="classifier")
def train_classifier(
    *,
    data: Annotated[str, Parameter(help="A .csv or .tsv file with a header, or `builtin`.")],
    label: Annotated[str, Parameter(help="Column of the labels; for the built-in texts food, price, area, ….")],
    text: Annotated[str, Parameter(help="Column of the texts.")] = "text",
    out: Annotated[Path, Parameter(help="Folder for the classifier; its name becomes the control's.")],
    model: Annotated[str, Parameter(help="The language model it will control, as for `svs sample`.")] = "bundled",
    kind: Annotated[
        Literal["light", "probe"], Parameter(help="On the model's embeddings, or a BiLSTM on its hidden states.")
    ] = "light",
    epochs: Annotated[float | None, Parameter(help="Passes over the texts; four or more if left out.")] = None,
    limit: Annotated[int | None, Parameter(help="Read no more texts than this.")] = None,
    seed: Seed = 0,
    device: Annotated[str, Parameter(help="cpu, cuda, …")] = "cpu",
) -> int:
    """Train a control from labelled texts of your own; use it with `svs sample --control FOLDER=LABEL`.

    Example: svs train classifier --data reviews.csv --text review --label mood --out ./mood
    """
    from rich.console import Console
    from rich.table import Table

    from structured_voronoi.base import SamplingError
    from structured_voronoi.experiments.report import writable_folder
    from structured_voronoi.models.classifier_training import check_labels, train_classifier
    from structured_voronoi.models.classifiers import ClassifierRecipe
    from structured_voronoi.models.corpora import labelled_texts
    from structured_voronoi.models.loading import load_model
    from structured_voronoi.run.progress import progress_bar

    _check_seed(seed)
    if epochs is not None and not 0 < epochs < 10_000:
        raise SamplingError(f"--epochs {epochs}: choose a positive number, 4 for example")
    found = labelled_texts(data, text, label, limit)
    check_labels(found.labels)
    recipe = ClassifierRecipe(kind=kind, epochs=epochs, seed=seed)
    loaded, folder = load_model(model, device), writable_folder(out)
    with progress_bar(recipe.steps(len(found.texts)), show=True, what="training") as tick:
        report = train_classifier(found.texts, found.labels, loaded, folder, recipe, tick)
    grid = Table("label", "precision", "recall", "F1", "held-out texts")
    for name, one in report["classes"].items():
        grid.add_row(name, *(f"{one[what]:.3f}" for what in ("precision", "recall", "f1")), str(one["count"]))
    Console(width=None if sys.stdout.isatty() else 120).print(grid)
    print(
        f"{folder}: macro-F1 {report['macro_f1']:.3f} on {report['held_out_texts']:,} held-out texts "
        f"({report['macro_f1_of_20_tokens']:.3f} cut to 20 tokens); {report['parameters']:,} parameters"
    )
    return 0


@app.command
def reproduce(
    name: Annotated[str, Parameter(help="Experiment, as listed by `svs ls`, or `all`.")],
    /,
    *,
    out: Out = Path("results"),
    runs: Annotated[
        int | None, Parameter(help="Independent runs (chains); the default is the experiment's own.")
    ] = None,
    seed: Annotated[int | None, Parameter(help="Seed; the default is the experiment's own.")] = None,
    data: Annotated[
        str | None,
        Parameter(help=f"{', '.join(WITH_DATA)}: train a language model on these texts first (kept in the cache)."),
    ] = None,
) -> int:
    """Reproduce a table or figure: writes NAME.json, NAME.md and NAME*.png.

    Examples: svs reproduce toy --out results
              svs reproduce lm --data path/to/e2e
    """
    import importlib

    from structured_voronoi.base import SamplingError, did_you_mean
    from structured_voronoi.experiments.report import writable_folder

    if name != "all" and name not in EXPERIMENTS:
        raise SamplingError(f"unknown experiment {name!r}; {did_you_mean(name, [*EXPERIMENTS, 'all'])}")
    if runs is not None and runs < 2:
        raise SamplingError(f"--runs {runs}: intervals need two or more runs; leave it out for the default")
    _check_seed(seed or 0)
    settings = {key: value for key, value in (("runs", runs), ("seed", seed)) if value is not None}
    if data not in (None, "builtin") and not Path(data).exists():
        raise SamplingError(f"--data {data} does not exist; give a folder of E2E or SST-2 files, or a text file")
    if data is not None and name not in (*WITH_DATA, "all"):
        raise SamplingError(f"--data does not go with {name}; it is for {', '.join(WITH_DATA)}")
    fits = {one for one, file in WITH_DATA.items() if data is not None and (not file or (Path(data) / file).exists())}
    if name not in fits and (name in NEED_DATA or (name in WITH_DATA and data is not None)):
        raise SamplingError(f"{name} needs texts with labels; give --data FOLDER with {WITH_DATA[name]}")
    left_out = [one for one in NEED_DATA if one not in fits] if name == "all" else []
    for one in left_out:
        print(f"svs: {one} is left out; it needs --data FOLDER with {WITH_DATA[one]}", file=sys.stderr)
    chosen = [one for one in EXPERIMENTS if one not in left_out] if name == "all" else [name]
    folder = writable_folder(out, chosen)
    for one in chosen:
        experiment = importlib.import_module(f"structured_voronoi.experiments.{one}")
        own = {"data": data} if one in fits else {}
        for path in experiment.run(folder, **settings, **own):
            print(path)
    return 0


@app.command
def verify(
    *,
    chains: Annotated[int, Parameter(help="Chains started at the truth; more see a smaller bias.")] = 20_000,
    seed: Seed = 0,
) -> int:
    """Check every sampler against targets whose truth is known.

    Many chains start at the truth, take a few steps, and are compared with the truth. Exits 1 if a sampler that claims
    to be exact is not; samplers that are biased by design are shown with their bias.
    """
    from rich.console import Console
    from rich.table import Table

    from structured_voronoi.base import SamplingError
    from structured_voronoi.experiments.verify import cases, verdicts
    from structured_voronoi.run.progress import progress_bar

    if chains < 1000:
        raise SamplingError(f"--chains {chains} would see no bias; use 1000 or more")
    grid = Table("sampler", "target", "TV", "floor", "TV/floor", "p", "moved", "verdict")
    failed = done = 0
    with contextlib.suppress(KeyboardInterrupt), progress_bar(len(cases()), show=True, what="verify") as tick:
        for verdict in verdicts(chains, seed):
            fit = verdict.found.fit
            failed, done = failed + verdict.failed, done + 1
            numbers = (f"{fit.tv:.4f}", f"{fit.floor:.4f}", f"{fit.ratio:.2f}", f"{fit.p_value:.2g}")
            row = (verdict.case.sampler, verdict.case.target, *numbers, f"{verdict.found.moved:.0%}", verdict.word)
            grid.add_row(*row, style="bold red" if verdict.failed else None)
            tick()
    Console(width=None if sys.stdout.isatty() else 120).print(grid)
    print(f"{failed} of {sum(case.claims_exact for case in cases())} claims of exactness failed ({chains:,} chains).")
    if done < len(cases()):
        print(f"svs: interrupted after {done} of {len(cases())} checks", file=sys.stderr)
        return 130
    return int(failed > 0)


@app.command
def ls() -> int:
    """List models, samplers, targets, controls and experiments."""
    from structured_voronoi.models.control_list import bundled_controls

    controls = {name: ", ".join(labels) for name, labels in bundled_controls().items()} | CONTROLS
    titles = {
        "models": MODELS,
        "samplers": SAMPLERS,
        "samplers on the command line (svs sample --sampler NAME)": TEXT_SAMPLERS,
        "targets": TARGETS,
        "controls": controls,
        "experiments": EXPERIMENTS,
    }
    for title, entries in titles.items():
        print(title)
        for name, what in entries.items():
            print(f"  {name:<20} {what}")
    return 0


def main() -> None:
    """Run the command: exit 0 for success, 1 for a failed check, 2 for a mistake in what was asked, 130 on Ctrl-C."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait in vain would slow a busy machine down
    gc.set_threshold(100_000)  # collecting garbage amid the imports of thousands of modules takes a second
    words = [word for word in sys.argv[1:] if word != "--debug"]
    debug = len(words) < len(sys.argv) - 1
    try:
        sys.exit(app(words, exit_on_error=False, print_error=False) or 0)
    except KeyboardInterrupt:
        print("svs: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader, `head` for example, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except CycloptsError as error:
        print(f"svs: {' '.join(str(error).split())} See `svs --help`.", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        from structured_voronoi.base import SamplingError

        if debug or not isinstance(error, SamplingError):
            raise
        print(f"svs: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
