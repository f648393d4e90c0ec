"""Kill runs at random moments and check that nothing is lost: `python benchmarks/kills.py --kills 200 --seed 0`.

Each job runs in a process of its own that is killed (SIGKILL) at a random moment: before or after one of its steps,
writes, renames or removals of files, or after a random time. It is started again and killed again until it ends by
itself. Its result must equal, bit for bit, that of a run without a checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xarray  # noqa: F401 (imported once, and not in every process)

import structured_voronoi as sv
from structured_voronoi.core.contracts import Chains
from structured_voronoi.engine.checkpoint import CheckpointSettings
from structured_voronoi.engine.settings import EngineSettings
from structured_voronoi.lookahead.settings import LookaheadSettings
from structured_voronoi.models.classifier_training import train_classifier
from structured_voronoi.models.classifiers import ClassifierSettings
from structured_voronoi.models.corpora import Corpus
from structured_voronoi.models.loading import load_model
from structured_voronoi.models.restaurants import descriptions
from structured_voronoi.models.training import TrainingSettings, train_language_model
from structured_voronoi.models.training_run import TrainingCheckpoint
from structured_voronoi.samplers import svs
from structured_voronoi.targets.tabular import AutoregressiveTable

SMALL_ROUNDS = EngineSettings(
    first_round=16, batch_rows=16, min_learning_tries=32, lookahead=LookaheadSettings(steps=20, batch=64)
)

Job = Callable[[Path | None, Path], bytes]
"""(checkpoint folder or None, folder for results) -> the result of the job."""


def every_step(folder: Path | None) -> CheckpointSettings:
    """A checkpoint that is saved after every step."""
    return CheckpointSettings(folder, interval=0.0, max_time_share=1e9)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    svs.PILOT_SCALES, svs.PILOT_STEPS = (0.3, 0.7), 5

    source, kills, runs, lost = random.Random(asked.seed), 0, 0, []
    jobs = {name: (job, run_once(job, None)[0], count_moments(job)) for name, job in all_jobs().items()}
    while kills < asked.kills:
        for name, (job, expected, (moments, seconds)) in jobs.items():
            with tempfile.TemporaryDirectory() as folder:
                found, its_kills = run_with_kills(job, Path(folder), moments, seconds, source)
            kills, runs = kills + its_kills, runs + 1
            if found != expected:
                lost.append(name)
            if kills >= asked.kills:
                break
    print(f"{kills} kills in {runs} runs of {len(jobs)} jobs, seed {asked.seed}: {runs - len(lost)} runs lost nothing")
    for name in lost:
        print(f"{name}: differs from a run that was never stopped")
    return 1 if lost else 0


def count_moments(job: Job) -> tuple[int, float]:
    """The number of moments at which a job can be killed, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        _, moments, seconds = run_once(job, Path(folder))
    return moments, seconds


def run_with_kills(job: Job, folder: Path, moments: int, seconds: float, source: random.Random) -> tuple[bytes, int]:
    """The result of a job, and the number of times it was killed."""
    for kills in range(1000):
        if source.random() < 0.7:
            found, *_ = run_once(job, folder, kill_at=source.randint(1, moments))
        else:
            found, *_ = run_once(job, folder, kill_after=source.uniform(0, seconds))
        if found:
            return found, kills
    raise RuntimeError("a job makes no progress")


def run_once(
    job: Job, folder: Path | None, kill_at: int | None = None, kill_after: float | None = None
) -> tuple[bytes, int, float]:
    """The digest of the result of a job in a process of its own, empty if it was killed; its moments and seconds."""
    began, (reader, writer) = time.monotonic(), os.pipe()
    process = os.fork()
    if not process:
        os.close(reader)
        _work(job, folder, writer, kill_at)
    os.close(writer)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(process, signal.SIGKILL)
    with open(reader, "rb") as answer:
        printed = answer.read()
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return b"", 0, 0.0
    if status:
        raise RuntimeError(f"a job ended with status {status}")
    digest, moments = printed.split()
    return digest, int(moments), time.monotonic() - began


def _work(job: Job, folder: Path | None, writer: int, kill_at: int | None) -> None:
    """Run a job in the forked process, which ends here."""
    code = 1
    try:
        moments = 0

        def moment() -> None:
            nonlocal moments
            moments += 1
            if moments == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        for owner, name in [(os, "fsync"), (os, "replace"), (Path, "unlink"), (Chains, "__next__")]:
            _add_moments(owner, name, moment)
        _add_moments(torch.optim.AdamW, "step", moment)
        results = Path(tempfile.mkdtemp() if folder is None else folder)
        results.mkdir(parents=True, exist_ok=True)
        result = job(None if folder is None else folder / "checkpoint", results / "results")
        os.write(writer, f"{hashlib.sha256(result).hexdigest()} {moments}".encode())
        if folder is None:
            shutil.rmtree(results)
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def _add_moments(owner: Any, name: str, moment: Callable[[], None]) -> None:
    """Make a moment before and after each call of a function."""
    function = getattr(owner, name)

    def called(*arguments: Any, **more: Any) -> Any:
        moment()
        result = function(*arguments, **more)
        moment()
        return result

    setattr(owner, name, called)


def all_jobs() -> dict[str, Job]:
    table, sentences = tables()
    jobs: dict[str, Job] = {}
    on_table = {
        "svs": sv.SVS(),
        "svs, closed": sv.SVS(0.6, walls="closed", masses="estimated", mass_draws=64),
        "hmc": sv.baselines.HMC(0.5, leapfrog_steps=2),
        "mucola": sv.baselines.MuCoLa(1.5),
        "svs + gwg": sv.Cycle(sv.SVS(0.6), sv.GibbsWithGradients()),
    }
    on_sentences = {
        "svs + refresh": sv.Cycle(sv.SVS(0.6), sv.Refresh(block=2)),
        "rejection": sv.Rejection(),
        "guided": sv.Guided(tries=3, texts=64),
        "smc": sv.baselines.SMC(particles=4, texts=64),
    }
    jobs |= {f"sample: {name}": sampling(table, sampler) for name, sampler in on_table.items()}
    jobs |= {f"sample: {name}": sampling(sentences, sampler) for name, sampler in on_sentences.items()}
    model, food = sv.load("bundled"), [sv.label("food", "Italian", weight=0.3)]
    texts: dict[str, dict[str, Any]] = {
        "chains": {"controls": food, "n": 18, "sampler": "svs+refresh", "warmup": 2},
        "prompts": {"prompt": ["Near the", "The", "At a"], "n": 30, "sampler": "ancestral"},
        "prompts with a control": {"prompt": ["Near the", "At"], "controls": food, "n": 9, "settings": SMALL_ROUNDS},
    }
    jobs |= {f"texts: {name}": generating(model, settings) for name, settings in texts.items()}
    return jobs | {
        "probability": estimating(sentences),
        "training: language model": training_a_language_model(),
        "training: classifier": training_a_classifier(),
    }


def tables() -> tuple[sv.TabularTarget, AutoregressiveTable]:
    """Two distributions of three tokens with a random field; the second one is autoregressive and has scores."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    embeddings, log_prob, field = normal(5, 3), normal(5, 5, 5), 0.2 * normal(5, 5, 5, 3, 3)
    log_prob = log_prob - log_prob.logsumexp((0, 1, 2))
    scores = -normal(5, 5, 5).abs()
    return sv.TabularTarget(embeddings, log_prob, field), AutoregressiveTable(embeddings, log_prob, field, scores)


def sampling(target: Any, sampler: Any) -> Job:
    def job(checkpoint: Path | None, _: Path) -> bytes:
        draws = sv.sample(
            target,
            sampler,
            chains=3,
            draws=6,
            warmup=3,
            thin=2,
            seed=7,
            checkpoint=every_step(checkpoint),
            progress=False,
        )
        stats = draws["sample_stats"]
        columns = [stats[name].values.tobytes() for name in sorted(stats.data_vars)]
        return b"".join([draws["posterior"]["tokens"].values.tobytes(), *columns, str(draws.attrs).encode()])

    return job


def generating(model: sv.LanguageModel, settings: dict[str, Any]) -> Job:
    def job(checkpoint: Path | None, results: Path) -> bytes:
        settled = {"max_tokens": 5, "finish": "length", "seed": 7, "progress": False, **settings}
        found = sv.generate(model, checkpoint=every_step(checkpoint), **settled)
        found.to_jsonl(results)
        return results.read_bytes() + found.diagnostics.summary().encode()

    return job


def estimating(target: AutoregressiveTable) -> Job:
    def job(checkpoint: Path | None, _: Path) -> bytes:
        found = sv.probability(
            target,
            texts=256,
            seed=7,
            progress=False,
            monte_carlo=True,
            checkpoint=every_step(checkpoint),
            settings=SMALL_ROUNDS,
        )
        return repr(found).encode()

    return job


def training_a_language_model() -> Job:
    texts = [one.text for one in descriptions(120, seed=0)]
    recipe = TrainingSettings(vocabulary=280, width=8, layers=1, heads=1, context=32, batch_size=8)

    def job(checkpoint: Path | None, results: Path) -> bytes:
        train_language_model(
            Corpus(texts, texts[:9]), results, recipe, _silence, checkpoint=TrainingCheckpoint(checkpoint, steps=3)
        )
        return (results / "model.safetensors").read_bytes()

    return job


def training_a_classifier() -> Job:
    texts = [one.text for one in descriptions(60, seed=0)]
    labels = ["even" if len(text) % 2 == 0 else "odd" for text in texts]
    loaded, recipe = load_model("bundled"), ClassifierSettings(hidden=8, epochs=6.0, batch_size=8)

    def job(checkpoint: Path | None, results: Path) -> bytes:
        train_classifier(texts, labels, loaded, results, recipe, _silence, TrainingCheckpoint(checkpoint, steps=3))
        return (results / "model.safetensors").read_bytes()

    return job


def _silence(note: str, steps: int) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
