"""Probabilities of words against plain texts: how many texts of the bundled model hold them, and what guided ones say.

`python benchmarks/plain_texts.py --texts 1000000` counts words in so many plain texts (2 ms of one core each) and
prints a table; what was counted is kept in `--out FILE`, and the same call goes on where it was stopped, but for some
seconds.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

import structured_voronoi as sv
from structured_voronoi.core.progress import progress_bar
from structured_voronoi.engine.probability import Probability
from structured_voronoi.problem.drawing import ancestral_draw
from structured_voronoi.problem.problem import bind

CASES = (("Italian", "river"), ("Italian", "riverside", "family"), ("Italian", "river", "family"))
LENGTH, BLOCK, SEED = 20, 512, 0
PILOT, WEIGHTED = 4096, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path("plain_texts.json"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = sv.load("bundled").target(max_tokens=LENGTH)
    hits = count_hits(model, asked.texts, asked.out)
    texts = BLOCK * len(hits)
    print(f"| words | {texts:,} plain texts | guided | standard errors apart |\n| --- | --- | --- | --- |")
    for case, column in zip(CASES, zip(*hits, strict=True), strict=True):
        share, guided = sum(column) / texts, guided_probability(model, case)
        error = math.sqrt(share * (1 - share) / texts)
        apart = (guided.value - share) / math.hypot(error, guided.value * guided.relative_error)
        print(f"| {', '.join(case)} | {share:.3g} ± {error:.1g} ({sum(column):,} texts) | {guided} | {apart:+.1f} |")


def count_hits(model: sv.LanguageModel, texts: int, out: Path) -> list[list[int]]:
    """For every block of texts, how many of them hold all words of each case."""
    hits: list[list[int]] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    problem, blocks = bind(model), -(-texts // BLOCK)
    keywords = {word: sv.keyword(word) for case in CASES for word in case}
    with progress_bar(blocks, True, "plain texts") as tick:
        tick("", len(hits))
        for block in range(len(hits), blocks):
            rng = sv.Rng(SEED, range(block * BLOCK, (block + 1) * BLOCK), "plain texts")
            decoded = [model.decode(row) for row in ancestral_draw(problem, rng).tokens]
            held = {word: [bool(keyword.function(text)) for text in decoded] for word, keyword in keywords.items()}
            hits.append([sum(map(all, zip(*(held[word] for word in case), strict=True))) for case in CASES])
            if block % 20 == 0 or block == blocks - 1:
                unfinished = out.with_suffix(".unfinished")
                unfinished.write_text(json.dumps(hits), encoding="utf-8")
                unfinished.replace(out)
            tick()
    return hits


def guided_probability(model: sv.LanguageModel, words: tuple[str, ...]) -> Probability:
    """By weighted texts of a lookahead, as `svs reproduce rare` has it."""
    target = model.under([sv.keyword(word) for word in words])
    lookahead = sv.Lookahead.fit(target, texts=PILOT, seed=SEED)
    return sv.probability(target, texts=WEIGHTED, seed=SEED, lookahead=lookahead, progress=False)


if __name__ == "__main__":
    main()
