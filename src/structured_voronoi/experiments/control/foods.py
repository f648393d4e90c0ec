"""The E2E restaurant reviews with the food each is about, and controls that use a classifier of food."""

from __future__ import annotations

import re
from pathlib import Path

from structured_voronoi.controls.labels import label
from structured_voronoi.controls.texts import keyword, regex
from structured_voronoi.core.contracts import Control
from structured_voronoi.experiments.control.task import ClassifierRecipes, train_guide
from structured_voronoi.models.corpora import Labelled, labelled_texts

NO_FOOD = "none"
"""Label of reviews that name no food."""


def food_splits(data: str) -> dict[str, Labelled]:
    """The reviews for training and for testing."""
    files = {"train": "trainset.csv", "test": "testset_w_refs.csv"}
    return {name: _read_foods(Path(data) / file) for name, file in files.items()}


def train_food_guide(data: str, model: str, recipes: ClassifierRecipes, length: int, progress: bool) -> str:
    """The folder of the classifier of food that guides, trained unless the cache has it."""
    return str(train_guide("topic", model, food_splits(data), NO_FOOD, recipes, length, progress)[0])


def food_guide(data: str | None, model: str, recipes: ClassifierRecipes, length: int, progress: bool) -> str:
    """The classifier of food: trained on the data, or the bundled one."""
    return "food" if data is None else train_food_guide(data, model, recipes, length, progress)


def three_controls(guide: str, words: tuple[str, ...], food: str = "Italian", weight: float = 1.5) -> list[Control]:
    """A classifier of food, a keyword, and a regular expression for a second word."""
    first, second = words
    return [label(guide, food, weight=weight), keyword(first), regex(rf"(?i)\b{second}\b")]


def _read_foods(path: Path) -> Labelled:
    """The reviews of one E2E file, labelled with their foods."""
    texts, meanings = labelled_texts(str(path), "ref", "mr")
    matches = [re.search(r"food\[(.*?)\]", meaning) for meaning in meanings]
    return Labelled(texts, [match[1] if match else NO_FOOD for match in matches])
