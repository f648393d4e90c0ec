r"""Regular expressions as automata over characters, made of the tree into which Python's own `re` parses them.

An automaton reads a text once, in time that grows with its length alone. `re` tries one way after another instead, and
takes for ever where an expression such as (a+)+$ has exponentially many. Anchors, \b and lookarounds of one character
are conditions on the characters on both sides of a place. Back-references, longer lookarounds, atomic groups and
possessive repeats have no automaton.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from structured_voronoi.core.contracts import Pattern

_parser: Any = importlib.import_module("re._parser")

MOST_NODES = 5000
"""Of an automaton: repeats are written out, so that (a{1000}){1000} would have a million."""
MOST_REMEMBERED = 10_000
"""Steps of a matcher that are kept, so that the next text need not compute them anew."""
SAFE_REPEATS = 3
"""Repeats without a bound beside each other that `re` can try in all combinations."""
LARGEST_NAMED_RANGE = 256
"""Characters of a range beyond ASCII that are all told apart byte by byte; of a longer one only its ends are."""
CLASS_FLAGS = re.IGNORECASE | re.ASCII | re.DOTALL
ANY, NEWLINE, WORD, NO_NEWLINE = r"[\s\S]", r"\n", r"\w", r"[^\n]"
CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}


class CannotCompile(Exception):
    """The expression has no automaton, or none that is small; what it asks for must be found out in another way."""


class Condition(NamedTuple):
    """What must be true of a place between two characters."""

    is_before: bool
    """Is it about the character before the place, or about the one after it?"""
    kind: int
    """The class of characters that is asked for."""
    wanted: bool
    """Must there be such a character, or must there be none?"""
    is_last: bool = False
    """Must the character after the place be the last of the text?"""


class State(NamedTuple):
    """Where a text has led to."""

    nodes: frozenset[int]
    before: int
    """The classes that the last character belongs to, as far as a condition asks for it."""


class CharacterAutomaton:
    """Reads a text character by character and says whether it matches.

    Nodes are joined by edges that read a character of a class, and by edges that read nothing but may have a condition.
    A node has a double, ``size`` higher, at which the text must be over: $ leads there before a last newline.
    """

    def __init__(self, pattern: Pattern) -> None:
        self._classes: dict[tuple[str, int], int] = {}
        self._tests: list[re.Pattern[str]] = []
        self._reading: list[list[tuple[int, int]]] = [[]]
        self._free: list[list[tuple[Condition | None, int]]] = [[]]
        self._work = 0
        self.named: set[str] = set()
        """Characters beyond ASCII that the expression names, as far as they have to be told from others."""
        tree = parse(pattern)
        if not pattern.whole:
            self._join(0, ANY, 0)
        self.final = self._build(tree, 0, tree.state.flags)
        if not pattern.whole:
            self._join(self.final, ANY, self.final)
        self.is_whole, self.size = pattern.whole, len(self._free)
        asked = (condition for edges in self._free for condition, _ in edges if condition and condition.is_before)
        self._remembered = sum({1 << condition.kind for condition in asked})
        self._kinds: dict[str, int] = {}
        self._steps: dict[tuple[State, int], State] = {}
        self.start = State(frozenset([0]), 0)

    def matches(self, text: str) -> bool:
        """In time linear in the length of the text."""
        state = self.start
        for character in text:
            state = self.advance(state, self.kinds(character))
        return self.accepts(state)

    def kinds(self, character: str) -> int:
        """The classes that a character belongs to, one bit for each."""
        if character not in self._kinds:
            belongs = (test.match(character) is not None for test in self._tests)
            self._kinds[character] = sum(1 << number for number, yes in enumerate(belongs) if yes)
        return self._kinds[character]

    def advance(self, state: State, kinds: int) -> State:
        """The state after one more character of these classes."""
        known = self._steps.get((state, kinds))
        if known is not None:
            return known
        nodes = self._follow((node for node in state.nodes if node < self.size), state.before, kinds)
        moved = frozenset(
            there + (self.size if node >= self.size else 0)
            for node in nodes
            for kind, there in self._reading[node % self.size]
            if kinds >> kind & 1
        )
        is_found = not self.is_whole and self.final in nodes  # whatever follows
        new = State(frozenset([self.final]), 0) if is_found else State(moved, kinds & self._remembered)
        if len(self._steps) >= MOST_REMEMBERED:
            self._steps.clear()
        self._steps[state, kinds] = new
        return new

    def accepts(self, state: State) -> bool:
        """Does a text that ends here match?"""
        return not self._follow(state.nodes, state.before, 0).isdisjoint((self.final, self.final + self.size))

    def _follow(self, nodes: Iterable[int], before: int, after: int) -> set[int]:
        """All nodes that can be reached without reading, between characters of these classes (0: there is none)."""
        waiting = list(nodes)
        reached = set(waiting)
        while waiting:
            node = waiting.pop()
            double = self.size if node >= self.size else 0
            for condition, there in self._free[node % self.size]:
                if condition is not None:
                    kinds = before if condition.is_before else after
                    if (kinds >> condition.kind & 1 == 1) != condition.wanted:
                        continue
                there += max(double, self.size if condition is not None and condition.is_last else 0)
                if there not in reached:
                    reached.add(there)
                    waiting.append(there)
        return reached

    def _build(self, items: Any, node: int, flags: int) -> int:
        """Nodes that read what a part of the tree asks for, after ``node``; the last of them."""
        self._count_work()
        for operation, argument in items:
            node = self._build_one(str(operation), argument, node, flags)
        return node

    def _build_one(self, operation: str, argument: Any, node: int, flags: int) -> int:
        written = self._write_class(operation, argument)
        if written is not None:
            return self._join(node, written, self._new(), flags)
        if operation == "BRANCH":
            end = self._new()
            for choice in argument[1]:
                self._pass(self._build(choice, node, flags), end)
            return end
        if operation == "SUBPATTERN":
            _, added, removed, inner = argument
            return self._build(inner, node, (flags | added) & ~removed)
        if operation in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = argument
            return self._repeat(least, most, inner, node, flags)
        if operation == "AT":
            return self._stand(str(argument), node, flags)
        if operation in ("ASSERT", "ASSERT_NOT"):
            direction, inner = argument
            neighbour = self._write_class(str(inner[0][0]), inner[0][1]) if len(inner) == 1 else None
            if neighbour is not None:
                kind = self._class(neighbour, flags)
                return self._pass(node, self._new(), Condition(direction < 0, kind, operation == "ASSERT"))
        raise CannotCompile(f"{operation.lower().replace('_', ' ')} has no automaton")

    def _repeat(self, least: int, most: int, inner: Any, node: int, flags: int) -> int:
        for _ in range(least):
            node = self._build(inner, node, flags)
        if most == _parser.MAXREPEAT:
            loop = self._pass(node, self._new())
            self._pass(self._build(inner, loop, flags), loop)
            return loop
        end = self._pass(node, self._new())
        for _ in range(most - least):
            node = self._build(inner, node, flags)
            self._pass(node, end)
        return end

    def _stand(self, place: str, node: int, flags: int) -> int:
        """Anchors and boundaries of words."""
        by_lines = flags & re.MULTILINE

        def is_next_to(is_before: bool, written: str, wanted: bool) -> Condition:
            return Condition(is_before, self._class(written, flags), wanted)

        ways: list[list[Condition]]
        if place in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            ways = [[is_next_to(True, NO_NEWLINE if by_lines and place == "AT_BEGINNING" else ANY, False)]]
        elif place in ("AT_END", "AT_END_STRING"):
            ways = [[is_next_to(False, NO_NEWLINE if by_lines and place == "AT_END" else ANY, False)]]
            if place == "AT_END" and not by_lines:
                ways.append([is_next_to(False, NEWLINE, True)._replace(is_last=True)])
        else:
            is_boundary = place == "AT_BOUNDARY"
            ways = [
                [is_next_to(True, WORD, word), is_next_to(False, WORD, word != is_boundary)] for word in (True, False)
            ]
        end = self._new()
        for conditions in ways:
            here = node
            for condition in conditions:
                here = self._pass(here, self._new(), condition)
            self._pass(here, end)
        return end

    def _write_class(self, operation: str, argument: Any) -> str | None:
        """A class of characters as `re` writes it; None if this is something else."""
        if operation == "ANY":
            return "."
        if operation in ("LITERAL", "NOT_LITERAL"):
            return f"[{'^' * (operation == 'NOT_LITERAL')}{self._write_range(argument, argument)}]"
        if operation != "IN":
            return None
        parts = []
        for name, value in argument:
            if str(name) == "NEGATE":
                parts.append("^")
            elif str(name) == "CATEGORY":
                parts.append(CATEGORIES[str(value)])
            else:
                parts.append(self._write_range(*(value if isinstance(value, tuple) else (value, value))))
        return f"[{''.join(parts)}]"

    def _write_range(self, first: int, last: int) -> str:
        is_long = last - first >= LARGEST_NAMED_RANGE
        self.named |= {chr(code) for code in ((first, last) if is_long else range(first, last + 1)) if code >= 128}
        return f"{re.escape(chr(first))}-{re.escape(chr(last))}"

    def _class(self, written: str, flags: int = 0) -> int:
        """The number of a class of characters."""
        key = (written, flags & CLASS_FLAGS)
        if key not in self._classes:
            self._classes[key] = len(self._tests)
            self._tests.append(re.compile(written, key[1]))
        return self._classes[key]

    def _new(self) -> int:
        self._count_work()
        self._reading.append([])
        self._free.append([])
        return len(self._free) - 1

    def _join(self, here: int, written: str, there: int, flags: int = 0) -> int:
        self._reading[here].append((self._class(written, flags), there))
        return there

    def _pass(self, here: int, there: int, condition: Condition | None = None) -> int:
        self._free[here].append((condition, there))
        return there

    def _count_work(self) -> None:
        self._work += 1
        if self._work > MOST_NODES:
            raise CannotCompile(f"written out, it has more than {MOST_NODES:,} parts")


def parse(pattern: Pattern) -> Any:
    """The tree of an expression; raises what `re.compile` raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a later Python may read otherwise
        return _parser.parse(pattern.expression, re.IGNORECASE if pattern.ignore_case else 0)


def may_take_for_ever(pattern: Pattern) -> bool:
    """Could `re` have more ways to try than it can, on some text? Choices inside repeats, or many repeats in a row."""
    return _has_many_ways(parse(pattern))


def _has_many_ways(items: Any) -> bool:
    choices = list(_choices(items, False))
    return any(inside for inside, _ in choices) or sum(unbounded for _, unbounded in choices) > SAFE_REPEATS


def _choices(items: Any, is_inside: bool) -> Iterator[tuple[bool, bool]]:
    """Every place where `re` has a choice: does it lie inside a repeat, and has it no bound?"""
    for operation, argument in items:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, inner = argument
            if least != most and name != "POSSESSIVE_REPEAT":
                yield is_inside, most == _parser.MAXREPEAT
            yield from _choices(inner, is_inside or most > 1)
        elif name == "BRANCH":
            yield is_inside, False
            for choice in argument[1]:
                yield from _choices(choice, is_inside)
        elif name in ("ASSERT", "ASSERT_NOT"):
            if _has_many_ways(argument[1]):  # once it has been tried, `re` does not come back to it
                yield True, True
        else:
            parts = argument if isinstance(argument, tuple) else (argument,)
            for part in parts:
                if isinstance(part, _parser.SubPattern):
                    yield from _choices(part, is_inside)
