"""Probabilities of words: shares of plain texts of the bundled model beside estimates from guided texts.

    python benchmarks/plain_texts.py --texts 1000000

Counts words in plain texts (2 ms of one core per text) and prints a table. Counts are saved to ``--out FILE``; the same
command resumes from the file.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

import structured_voronoi as sv
from structured_voronoi.core.progress import progress_bar
from structured_voronoi.problem.drawing import ancestral_draw
from structured_voronoi.problem.problem import bind

CASES = (("Italian", "river"), ("Italian", "riverside", "family"), ("Italian", "river", "family"))
BLOCK_SIZE = 512
"""Plain texts drawn together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path("plain_texts.json"))
    parser.add_argument("--pilot", type=int, default=4096, help="texts a lookahead is fitted on")
    parser.add_argument("--guided-texts", type=int, default=2048, help="guided texts per estimate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = sv.load("bundled").target(max_tokens=20)
    hits = count_hits(target, options.texts, options.out, options.seed)
    texts = BLOCK_SIZE * len(hits)
    print(f"| words | share of {texts:,} plain texts | guided | difference, standard errors |")
    print("| --- | --- | --- | --- |")
    for words, column in zip(CASES, zip(*hits, strict=True), strict=True):
        share = sum(column) / texts
        guided = guided_probability(target, words, options.pilot, options.guided_texts, options.seed)
        error = math.sqrt(share * (1 - share) / texts)
        apart = (guided.value - share) / math.hypot(error, guided.value * guided.relative_error)
        print(f"| {', '.join(words)} | {share:.3g} ± {error:.1g} ({sum(column):,} texts) | {guided} | {apart:+.1f} |")


def count_hits(target: sv.TextTarget, texts: int, out: Path, seed: int) -> list[list[int]]:
    """Number of texts with all words of each case, for every block of texts."""
    hits: list[list[int]] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    problem, blocks = bind(target), -(-texts // BLOCK_SIZE)
    keywords = {word: sv.keyword(word) for words in CASES for word in words}
    with progress_bar(blocks, True, "plain texts", stage="experiment") as tick:
        tick("", len(hits))
        for block in range(len(hits), blocks):
            rng = sv.Rng(seed, range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE), "plain texts")
            decoded = [target.decode(row) for row in ancestral_draw(problem, rng).tokens]
            held = {word: [bool(keyword.function(text)) for text in decoded] for word, keyword in keywords.items()}
            hits.append([sum(map(all, zip(*(held[word] for word in words), strict=True))) for words in CASES])
            if block % 20 == 0 or block == blocks - 1:
                unfinished = out.with_suffix(".unfinished")
                unfinished.write_text(json.dumps(hits), encoding="utf-8")
                unfinished.replace(out)
            tick()
    return hits


def guided_probability(
    target: sv.TextTarget, words: tuple[str, ...], pilot: int, texts: int, seed: int
) -> sv.Probability:
    """Estimate from weighted texts of a lookahead."""
    controlled = target.under([sv.keyword(word) for word in words])
    lookahead = sv.Lookahead.fit(controlled, texts=pilot, seed=seed)
    return sv.probability(controlled, texts=texts, seed=seed, lookahead=lookahead, progress=False)


if __name__ == "__main__":
    main()
