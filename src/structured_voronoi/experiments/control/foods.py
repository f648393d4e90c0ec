"""The E2E reviews by the food that each is about, and the classifier of food that guides."""

from __future__ import annotations

import re
from pathlib import Path

from structured_voronoi.experiments.control.task import ClassifierRecipes, train_guide
from structured_voronoi.models.corpora import Labelled, labelled_texts

NO_FOOD = "none"
FILES = {"train": "trainset.csv", "test": "testset_w_refs.csv"}


def food_splits(data: str) -> dict[str, Labelled]:
    """The reviews to learn from and to test by."""
    return {name: _read_foods(Path(data) / file) for name, file in FILES.items()}


def train_food_guide(data: str, model: str, recipes: ClassifierRecipes, length: int, progress: bool) -> str:
    """The folder of the classifier of food that guides, trained if need be."""
    return str(train_guide("topic", model, food_splits(data), NO_FOOD, recipes, length, progress)[0])


def _read_foods(path: Path) -> Labelled:
    """The reviews of one E2E file and the food that each is about, or none."""
    texts, meanings = labelled_texts(str(path), "ref", "mr")
    matches = [re.search(r"food\[(.*?)\]", meaning) for meaning in meanings]
    return Labelled(texts, [match[1] if match else NO_FOOD for match in matches])
