r"""Regular expressions as automata over characters, built from the parse tree of Python's `re`.

The meaning of an expression is exactly that of Python's `re`, which is why this compiler is used and no other. An
automaton reads a text in linear time, where `re` backtracks, for example exponentially with (a+)+$. Anchors, \b and
lookarounds of one character are conditions on the characters on both sides of a position. Back-references, longer
lookarounds, atomic groups and possessive repeats cannot be compiled.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from structured_voronoi.core.contracts import Pattern

_parser: Any = importlib.import_module("re._parser")

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
    """The expression has no automaton, or its automaton is too large."""


class Condition(NamedTuple):
    """Requirement on a position between two characters."""

    is_before: bool
    """Whether it concerns the character before the position; otherwise the one after it."""
    kind: int
    """Number of a class of characters."""
    wanted: bool
    """Whether a character of this class is required; otherwise it is forbidden."""
    is_last: bool = False
    """Whether the character after the position must be the last of the text."""


class State(NamedTuple):
    """State of the automaton after some characters."""

    nodes: frozenset[int]
    before: int
    """Classes of the last character, as far as conditions depend on them, one bit each."""


class CharacterAutomaton:
    """Nondeterministic automaton that reads a text character by character.

    Nodes are connected by edges that read a character of a class, and by empty edges, which may have a condition. The
    copy of a node, ``size`` higher, accepts no further characters except a final newline: $ leads there.
    """

    def __init__(self, pattern: Pattern) -> None:
        self._classes: dict[tuple[str, int], int] = {}
        self._tests: list[re.Pattern[str]] = []
        self._reading: list[list[tuple[int, int]]] = [[]]
        self._free: list[list[tuple[Condition | None, int]]] = [[]]
        self._node_count = 0
        self.named: set[str] = set()
        """Non-ASCII characters in the expression."""
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
        """Return whether a text matches, in linear time."""
        state = self.start
        for character in text:
            state = self.advance(state, self.kinds(character))
        return self.accepts(state)

    def kinds(self, character: str) -> int:
        """Return the classes of a character, one bit each."""
        if character not in self._kinds:
            belongs = (test.match(character) is not None for test in self._tests)
            self._kinds[character] = sum(1 << number for number, yes in enumerate(belongs) if yes)
        return self._kinds[character]

    def advance(self, state: State, kinds: int) -> State:
        """Return the state after a character of these classes."""
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
        is_matched = not self.is_whole and self.final in nodes  # whatever follows
        new = State(frozenset([self.final]), 0) if is_matched else State(moved, kinds & self._remembered)
        if len(self._steps) >= 10_000:  # bounds the memory of the cache
            self._steps.clear()
        self._steps[state, kinds] = new
        return new

    def accepts(self, state: State) -> bool:
        """Return whether a text that ends here matches."""
        return not self._follow(state.nodes, state.before, 0).isdisjoint((self.final, self.final + self.size))

    def _follow(self, nodes: Iterable[int], before: int, after: int) -> set[int]:
        """Return the nodes that empty edges reach between characters of these classes (0: no character)."""
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
        """Append the nodes of a part of the tree to ``node`` and return the last one."""
        self._count_nodes()
        for operation, argument in items:
            node = self._build_one(str(operation), argument, node, flags)
        return node

    def _build_one(self, operation: str, argument: Any, node: int, flags: int) -> int:
        syntax = self._class_syntax(operation, argument)
        if syntax is not None:
            return self._join(node, syntax, self._new(), flags)
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
            return self._add_anchor(str(argument), node, flags)
        if operation in ("ASSERT", "ASSERT_NOT"):
            direction, inner = argument
            neighbour = self._class_syntax(str(inner[0][0]), inner[0][1]) if len(inner) == 1 else None
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

    def _add_anchor(self, place: str, node: int, flags: int) -> int:
        """Append an anchor or a word boundary."""
        by_lines = flags & re.MULTILINE

        def is_next_to(is_before: bool, syntax: str, wanted: bool) -> Condition:
            return Condition(is_before, self._class(syntax, flags), wanted)

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

    def _class_syntax(self, operation: str, argument: Any) -> str | None:
        """Return a class of characters in the syntax of `re`, or None for another operation."""
        if operation == "ANY":
            return "."
        if operation in ("LITERAL", "NOT_LITERAL"):
            return f"[{'^' * (operation == 'NOT_LITERAL')}{self._range_syntax(argument, argument)}]"
        if operation != "IN":
            return None
        parts = []
        for name, value in argument:
            if str(name) == "NEGATE":
                parts.append("^")
            elif str(name) == "CATEGORY":
                parts.append(CATEGORIES[str(value)])
            else:
                parts.append(self._range_syntax(*(value if isinstance(value, tuple) else (value, value))))
        return f"[{''.join(parts)}]"

    def _range_syntax(self, first: int, last: int) -> str:
        is_long = last - first >= 256  # only its ends are compiled byte by byte
        self.named |= {chr(code) for code in ((first, last) if is_long else range(first, last + 1)) if code >= 128}
        return f"{re.escape(chr(first))}-{re.escape(chr(last))}"

    def _class(self, syntax: str, flags: int = 0) -> int:
        """Return the number of a class of characters."""
        key = (syntax, flags & CLASS_FLAGS)
        if key not in self._classes:
            self._classes[key] = len(self._tests)
            self._tests.append(re.compile(syntax, key[1]))
        return self._classes[key]

    def _new(self) -> int:
        self._count_nodes()
        self._reading.append([])
        self._free.append([])
        return len(self._free) - 1

    def _join(self, here: int, syntax: str, there: int, flags: int = 0) -> int:
        self._reading[here].append((self._class(syntax, flags), there))
        return there

    def _pass(self, here: int, there: int, condition: Condition | None = None) -> int:
        self._free[here].append((condition, there))
        return there

    def _count_nodes(self) -> None:
        max_nodes = 5000  # repeats are unrolled: (a{1000}){1000} would have a million
        self._node_count += 1
        if self._node_count > max_nodes:
            raise CannotCompile(f"the automaton has more than {max_nodes:,} nodes")


def parse(pattern: Pattern) -> Any:
    """Return the parse tree of an expression; raises the errors of `re.compile`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about future changes of the syntax
        return _parser.parse(pattern.expression, re.IGNORECASE if pattern.ignore_case else 0)


def may_backtrack_for_long(pattern: Pattern) -> bool:
    """Return whether `re` may take exponential time: choices inside repeats, or many repeats beside each other."""
    return _is_ambiguous(parse(pattern))


def _is_ambiguous(items: Any) -> bool:
    choices, max_unbounded = list(_choices(items, False)), 3  # which `re` can try in all combinations
    return any(inside for inside, _ in choices) or sum(unbounded for _, unbounded in choices) > max_unbounded


def _choices(items: Any, is_inside: bool) -> Iterator[tuple[bool, bool]]:
    """Return (is inside a repeat, is unbounded) for every choice of `re`."""
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
            if _is_ambiguous(argument[1]):  # tried once: `re` does not return to it
                yield True, True
        else:
            parts = argument if isinstance(argument, tuple) else (argument,)
            for part in parts:
                if isinstance(part, _parser.SubPattern):
                    yield from _choices(part, is_inside)
