"""The simulation of many workers in cases that can be computed by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from scaling import Cluster, simulate

IDEAL = Cluster(
    workers=20, work=1000.0, length=100.0, between_failures=float("inf"), starting=0.0, handling=0.0, between_parts=10.0
)


def changed(**settings: float) -> Cluster:
    return Cluster(**{**vars(IDEAL), **settings})


def test_no_time_is_lost_without_failures() -> None:
    assert simulate(IDEAL) == (1.0, 0.0, 0)
    assert simulate(changed(starting=250.0)) == (pytest.approx(1000 / 1250), 0.0, 0)


def test_tasks_wait_for_a_driver_that_is_slower_than_workers() -> None:
    """Twenty workers finish a task of 10 s each, and the driver needs 2 s for each task."""
    assert simulate(changed(length=10.0, handling=2.0)).throughput == pytest.approx(0.25, rel=0.01)


def test_saved_parts_bound_the_cost_of_a_failure() -> None:
    with_parts, without = (
        simulate(changed(work=20_000.0, between_failures=200.0, between_parts=seconds)) for seconds in (10.0, 1e9)
    )
    assert with_parts.failures > 1000
    assert with_parts.lost * 20 * 20_000 / with_parts.throughput / with_parts.failures < 10.0  # seconds a failure
    assert without.lost > 3 * with_parts.lost
    assert without.throughput < with_parts.throughput
    assert simulate(changed(between_failures=200.0)) == simulate(changed(between_failures=200.0))
