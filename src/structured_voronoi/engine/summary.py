"""The summary that `sample` adds to its draws: scores of the controls, some texts, the diagnosis."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import torch
from xarray import DataTree

from structured_voronoi.core.errors import one_line
from structured_voronoi.core.progress import is_interactive
from structured_voronoi.core.streams import in_blocks
from structured_voronoi.diagnostics.checks import DiagnosticWarning
from structured_voronoi.diagnostics.diagnosis import diagnose_record
from structured_voronoi.diagnostics.records import record_of_draws
from structured_voronoi.problem.problem import Problem


def add_summary(draws: DataTree, problem: Problem, progress: bool) -> None:
    """Add a summary to the draws. With progress on a terminal, also print the warnings.

    Errors of the target and Ctrl-C become warnings, so that no draw is lost.
    """
    warnings = []
    try:
        _add_scores(draws, problem)
        _add_texts(draws, problem)
    except (Exception, KeyboardInterrupt) as error:
        cause = one_line(error) or type(error).__name__
        warnings.append(
            DiagnosticWarning(
                "no-scores",
                f"the target failed to score or decode the draws ({cause}); controls are not diagnosed",
                "correct `log_factors` or `decode` of the target",
            )
        )
    found = diagnose_record(record_of_draws(draws))
    found = replace(found, warnings=[*found.warnings, *warnings])
    draws.attrs["diagnosis"] = found.summary()
    if progress and is_interactive():
        for warning in found.warnings:
            print(f"sample: warning: {warning}", file=sys.stderr)


def _add_scores(draws: DataTree, problem: Problem) -> None:
    """Add the scores that log p contains besides the language model's: sample_stats["log_factors"]."""
    log_factors = problem.log_factors
    if log_factors is None:
        return
    tokens = draws["posterior"].to_dataset()["tokens"].values
    distinct, places = np.unique(tokens.reshape(-1, tokens.shape[-1]), axis=0, return_inverse=True)
    names: list[str] = []

    def score(rows: torch.Tensor) -> torch.Tensor:
        found = log_factors(rows)
        names[:] = found
        return torch.stack(list(found.values()), dim=-1) if found else rows.new_zeros(len(rows), 0)

    scores = in_blocks(score, torch.from_numpy(distinct).to(problem.device), rows_at_a_time=64)
    if names:
        values = scores.cpu().numpy()[places.ravel()].reshape(*tokens.shape[:2], -1)
        stats = draws["sample_stats"].to_dataset().assign(log_factors=(("chain", "draw", "factor"), values))
        draws["sample_stats"] = DataTree(stats.assign_coords(factor=names))


def _add_texts(draws: DataTree, problem: Problem, max_texts: int = 4) -> None:
    """Add the texts of the last draw of some chains: attrs["texts"]."""
    decode = getattr(problem, "decode", None)
    if decode is not None:
        last = torch.from_numpy(draws["posterior"].to_dataset()["tokens"].values[:max_texts, -1])
        draws.attrs["texts"] = json.dumps([str(decode(row)) for row in last], ensure_ascii=False)
