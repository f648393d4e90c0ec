"""Tests of samplers on targets with known probabilities, and deliberately broken samplers to test the tests.

>>> import structured_voronoi as sv
>>> result = sv.verify.stationarity(sv.SVS(1.0), sv.verify.random_target(seed=0), chains=2000, steps=4)
>>> result.p_value > 1e-4 and result.moved > 0.3
True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structured_voronoi.verify import twins as twins
    from structured_voronoi.verify.checks import Case as Case
    from structured_voronoi.verify.checks import Verdict as Verdict
    from structured_voronoi.verify.checks import cases as cases
    from structured_voronoi.verify.checks import verdicts as verdicts
    from structured_voronoi.verify.round_trips import RoundTrip as RoundTrip
    from structured_voronoi.verify.round_trips import round_trip as round_trip
    from structured_voronoi.verify.stationary import Stationarity as Stationarity
    from structured_voronoi.verify.stationary import stationarity as stationarity
    from structured_voronoi.verify.truths import known_targets as known_targets
    from structured_voronoi.verify.truths import random_target as random_target
    from structured_voronoi.verify.truths import sentences as sentences

_HOMES = {
    "stationarity": "stationary",
    "Stationarity": "stationary",
    "round_trip": "round_trips",
    "RoundTrip": "round_trips",
    "random_target": "truths",
    "sentences": "truths",
    "known_targets": "truths",
    "Case": "checks",
    "Verdict": "checks",
    "cases": "checks",
    "verdicts": "checks",
}
__all__ = sorted([*_HOMES, "twins"])


def __getattr__(name: str) -> Any:
    if name == "twins":
        return importlib.import_module("structured_voronoi.verify.twins")
    if name not in _HOMES:
        raise AttributeError(
            f"module 'structured_voronoi.verify' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"structured_voronoi.verify.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
