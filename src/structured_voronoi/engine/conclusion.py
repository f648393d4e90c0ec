"""The end of a run: what the controls say of its draws, some texts, and the diagnosis are put with them."""

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
from structured_voronoi.diagnostics.diagnosis import diagnose_record
from structured_voronoi.diagnostics.findings import Finding
from structured_voronoi.diagnostics.records import record_of_draws
from structured_voronoi.problem.problem import Problem

SHOWN, AT_A_TIME = 4, 64
"""Texts in a summary, each the last of a chain; draws that are scored at a time."""


def conclude(draws: DataTree, problem: Problem, progress: bool) -> None:
    """Put the diagnosis with the draws; whoever watches the run is told its warnings, too.

    The target is asked about every draw once more, and its answers only inform: whatever goes wrong with them, or
    Ctrl-C, is told in the diagnosis and costs no draw.
    """
    findings = []
    try:
        _add_factors(draws, problem)
        _add_texts(draws, problem)
    except (Exception, KeyboardInterrupt) as error:
        cause = one_line(error) or type(error).__name__
        words = f"the target could say no more of its draws ({cause}): the diagnosis goes without its controls"
        findings.append(Finding(words, serious=False))
    found = diagnose_record(record_of_draws(draws))
    found = replace(found, findings=[*found.findings, *findings])
    draws.attrs["diagnosis"] = str(found)
    if progress and is_interactive():
        for words in found.warnings:
            print(f"sample: warning: {words}", file=sys.stderr)


def _add_factors(draws: DataTree, problem: Problem) -> None:
    """The terms that log p has besides the language model's, by name, of every draw: (chain, draw, factor)."""
    log_factors = problem.log_factors
    if log_factors is None:
        return
    tokens = draws["posterior"].to_dataset()["tokens"].values
    distinct, places = np.unique(tokens.reshape(-1, tokens.shape[-1]), axis=0, return_inverse=True)
    names: list[str] = []

    def factors(rows: torch.Tensor) -> torch.Tensor:
        found = log_factors(rows)
        names[:] = found
        return torch.stack(list(found.values()), dim=-1) if found else rows.new_zeros(len(rows), 0)

    scores = in_blocks(factors, torch.from_numpy(distinct).to(problem.device), rows_at_a_time=AT_A_TIME)
    if names:
        values = scores.cpu().numpy()[places.ravel()].reshape(*tokens.shape[:2], -1)
        stats = draws["sample_stats"].to_dataset().assign(log_factors=(("chain", "draw", "factor"), values))
        draws["sample_stats"] = DataTree(stats.assign_coords(factor=names))


def _add_texts(draws: DataTree, problem: Problem) -> None:
    decode = getattr(problem, "decode", None)
    if decode is not None:
        last = torch.from_numpy(draws["posterior"].to_dataset()["tokens"].values[:SHOWN, -1])
        draws.attrs["texts"] = json.dumps([str(decode(row)) for row in last], ensure_ascii=False)
