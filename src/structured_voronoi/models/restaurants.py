"""The built-in corpus: random restaurant descriptions with labels, written for this project.

Each text combines random attributes with random sentence patterns. The generator depends on its seed alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

FOODS = ("Chinese", "English", "Fast food", "French", "Indian", "Italian", "Japanese")
PRICES = ("cheap", "moderate", "expensive")
RATINGS = ("low", "average", "high")
AREAS = ("riverside", "city centre")
FAMILY = ("yes", "no")
LABELS = {"food": FOODS, "price": PRICES, "rating": RATINGS, "area": AREAS, "family": FAMILY}
"""The attributes of a restaurant and their values."""

_FIRST = ("The Golden", "The Silver", "The Old", "The Little", "The Green", "The Blue", "The Hungry", "The Royal")
_SECOND = (
    "Lantern", "Anchor", "Kettle", "Garden", "Spoon", "Harbour", "Fox", "Willow", "Mill", "Table", "Plough", "Swan",
)  # fmt: skip
_SINGLE = ("Marlow's", "Bellini", "Ostra", "Casa Verde", "Number Nine", "Tamarind", "Juniper", "Pier House")
_LANDMARKS = (
    "the cathedral", "the old bridge", "the market", "the railway station", "the theatre", "the town hall",
    "the botanic garden", "the museum", "Queen's Park", "the boat house", "the library", "St Anne's church",
)  # fmt: skip
_KINDS = ("restaurant", "pub", "coffee shop", "bistro", "diner", "place")

_FOOD_WORDS = {
    "Chinese": ("Chinese food", "Chinese dishes", "dumplings and noodles", "a Chinese menu"),
    "English": ("English food", "traditional English dishes", "pies and roasts", "English classics"),
    "Fast food": ("fast food", "burgers and chips", "quick bites", "fast food favourites"),
    "French": ("French food", "French cuisine", "French country cooking", "a French menu"),
    "Indian": ("Indian food", "Indian curries", "spicy Indian dishes", "an Indian menu"),
    "Italian": ("Italian food", "pasta and pizza", "Italian classics", "an Italian menu"),
    "Japanese": ("Japanese food", "sushi and ramen", "Japanese dishes", "a Japanese menu"),
}
_PRICE_WORDS = {
    "cheap": ("cheap", "inexpensive", "low-priced", "affordable"),
    "moderate": ("moderately priced", "mid-range", "reasonably priced"),
    "expensive": ("expensive", "high-priced", "costly", "upmarket"),
}
_PRICE_RANGES = {"cheap": "less than £20", "moderate": "between £20 and £25", "expensive": "more than £30"}
_RATING_WORDS = {
    "low": ("a low customer rating", "a rating of 1 out of 5", "poor reviews", "a disappointing rating"),
    "average": ("an average customer rating", "a rating of 3 out of 5", "mixed reviews", "a fair rating"),
    "high": ("a high customer rating", "a rating of 5 out of 5", "excellent reviews", "a very good rating"),
}
_AREA_WORDS = {
    "riverside": ("by the river", "in the riverside area", "on the riverside", "at the water's edge"),
    "city centre": ("in the city centre", "in the centre of town", "in the heart of the city", "downtown"),
}
_FAMILY_WORDS = {
    "yes": ("family friendly", "child friendly", "good for children", "welcoming to families"),
    "no": ("not family friendly", "for adults only", "not suitable for children", "not child friendly"),
}

# A pattern mentions up to four attributes; {price} is an adjective, {rating} and {food} are nouns.
_OPENINGS = (
    "{name} is a {price} {kind} {area}.",
    "{name} is a {kind} that serves {food}.",
    "{name} serves {food} {area}.",
    "{name} is a {price} {kind} serving {food}.",
    "{name} is a {kind} {area} near {near}.",
    "{name} is a {kind} {area} and is {family}.",
    "Near {near} you will find {name}, a {kind} with {food}.",
    "Close to {near} there is a {price} {kind} called {name}.",
    "There is a {kind} called {name} {area}.",
    "There is a {price} {kind} near {near}, {name}, which serves {food}.",
    "If you like {food}, try {name} {area}.",
    "For {food} near {near}, go to {name}.",
    "Located {area}, {name} is a {kind} with {rating}.",
    "Located near {near}, {name} offers {food}.",
    "With {rating}, {name} is a {kind} serving {food}.",
    "{name}, near {near}, is a {price} {kind}.",
    "{name}, a {kind} {area}, has {rating}.",
    "{name} offers {food} at {range} a head.",
    "You can get {food} at {name}, a {kind} {area}.",
    "A {price} {kind} {area} is {name}.",
    "The {kind} near {near}, {name}, is {family}.",
    "Visit {name} for {food} {area}.",
    "People who want {food} should visit {name} near {near}.",
    "Looking for {food}? {name} is a {kind} near {near}.",
    "The {kind} {name} has {food} and {rating}.",
    "The {kind} {name} is {family} and {price}.",
    "The {price} {kind} {name} can be found {area}.",
    "Down near {near}, {name} serves {food} to locals.",
    "{name} has been serving {food} near {near} for years.",
    "{name} is {area}, close to {near}.",
)
_FOLLOWERS = (
    "It has {rating}.",
    "It is {family}.",
    "It is {price}.",
    "It is {area}.",
    "It is near {near}.",
    "It serves {food}.",
    "It offers {food} and is {family}.",
    "It is {price} and has {rating}.",
    "It is {family} and {price}.",
    "It is {area} and {family}.",
    "It is {area}, near {near}.",
    "It has {rating} and is {family}.",
    "It has {rating} and serves {food}.",
    "Prices are {range}.",
    "The price range is {range}.",
    "Meals cost {range}.",
    "Expect to pay {range}.",
    "The food is {price} and the place is {family}.",
    "The menu is {food}, and a meal costs {range}.",
    "Customers gave it {rating}.",
    "Guests have given it {rating}.",
    "It received {rating} from customers.",
    "You will find it near {near}.",
    "You will find it {area}.",
    "Find it {area}, close to {near}.",
    "Families should know that it is {family}.",
    "Note that it is {family}.",
    "Sadly or happily, it has {rating}.",
    "Although it is {price}, it has {rating}.",
    "The kitchen is known for {food}.",
    "Most guests come for {food}.",
    "It sits {area} and serves {food}.",
    "It stands near {near} and has {rating}.",
    "Its customers call it {price}, and it is {family}.",
    "This {kind} has {rating}.",
    "This {kind} is {price} and {family}.",
)
PATTERNS = len(_OPENINGS) + len(_FOLLOWERS)
"""Number of sentence patterns."""


class Description(NamedTuple):
    """A text, and the values of the attributes that it mentions."""

    text: str
    labels: dict[str, str]


def descriptions(count: int, seed: int) -> Iterator[Description]:
    """Generate random descriptions.

    Parameters
    ----------
    count
        How many.
    seed
        Equal seeds give equal descriptions.

    Yields
    ------
    Description
        A text and its labels.

    Examples
    --------
    >>> next(descriptions(1, seed=0)).labels["food"]
    'Japanese'
    """
    rng = random.Random(seed)
    for _ in range(count):
        yield _make_description(rng)


def _make_description(rng: random.Random) -> Description:
    facts = {name: rng.choice(values) for name, values in LABELS.items()}
    words = {
        "name": _make_name(rng),
        "kind": rng.choice(_KINDS),
        "near": rng.choice(_LANDMARKS),
        "range": _PRICE_RANGES[facts["price"]],
        "food": rng.choice(_FOOD_WORDS[facts["food"]]),
        "price": rng.choice(_PRICE_WORDS[facts["price"]]),
        "rating": rng.choice(_RATING_WORDS[facts["rating"]]),
        "area": rng.choice(_AREA_WORDS[facts["area"]]),
        "family": rng.choice(_FAMILY_WORDS[facts["family"]]),
    }
    opening = rng.choice(_OPENINGS)
    mentioned = _slots(opening)
    sentences = [opening]
    for pattern in rng.sample(_FOLLOWERS, 12):
        slots = _slots(pattern)
        if len(sentences) < 3 and not slots & mentioned:  # no attribute twice
            sentences.append(pattern)
            mentioned |= slots
        if len(sentences) == 2 and rng.random() < 0.3:
            break
    text = " ".join(sentence.format(**words) for sentence in sentences)
    text = text.replace(" a expensive", " an expensive").replace(" a inexpensive", " an inexpensive")
    text = text.replace(" a affordable", " an affordable").replace(" a upmarket", " an upmarket")
    if text.startswith(("A expensive", "A inexpensive", "A affordable", "A upmarket")):
        text = "An" + text[1:]
    return Description(text, {name: fact for name, fact in facts.items() if name in mentioned})


def _slots(pattern: str) -> set[str]:
    """The attributes that a pattern mentions; a price range counts as the price."""
    named = {name for name in ("food", "price", "rating", "area", "family", "near") if "{" + name + "}" in pattern}
    return named | ({"price"} if "{range}" in pattern else set())


def _make_name(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(_SINGLE)
    return f"{rng.choice(_FIRST)} {rng.choice(_SECOND)}"
