r"""Regular expressions as automata over bytes.

The library interegular turns an expression into an automaton over characters, but knows no zero-width assertions. Those
that ask for nothing but the neighbouring characters (^ $ \b \B, and the edges of a keyword) are written as marks, one
character each, which the text never holds: a mark may be read, once, wherever its condition is met. What is left are
lookarounds and back-references, which no small automaton has: such expressions are not compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import interegular
import numpy as np
from interegular.fsm import FSM, anything_else
from jaxtyping import Bool, Int
from numpy import ndarray

from structured_voronoi.contracts import Pattern

START, END, BOUNDARY, INSIDE, NO_WORD_BEFORE, NO_WORD_AFTER = MARKS = "\ue000\ue001\ue002\ue003\ue004\ue005"
ANYTHING = f"[^{MARKS}]*"
MOST_STATES = 400
"""Larger automata are not worth a head for each of their states."""


class CannotCompile(Exception):
    """The expression has no small automaton; what it asks for must be learnt from examples."""


@dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton over bytes; state 0 is where a text begins."""

    step: Int[ndarray, "state 256"]
    accepting: Bool[ndarray, " state"]
    """Does a text that ends here match?"""

    @property
    def satisfied(self) -> Bool[ndarray, " state"]:
        """States from which every text matches, whatever follows."""
        kept = self.accepting.copy()
        while (kept & ~kept[self.step].all(-1)).any():
            kept &= kept[self.step].all(-1)
        return kept


def compile_pattern(pattern: Pattern) -> Automaton:
    """The automaton of a pattern, by breadth-first search over bytes from the beginning of a text."""
    matcher = _Matcher(_character_automaton(pattern))
    numbers, rows, accepting = {matcher.start: 0}, [], []
    waiting = [matcher.start]
    for state in waiting:  # grows as it goes
        row = []
        for byte in range(256):
            after = matcher.advance(state, byte)
            if after not in numbers:
                numbers[after] = len(numbers)
                waiting.append(after)
                if len(waiting) > MOST_STATES:
                    raise CannotCompile(f"{pattern.expression!r} needs more than {MOST_STATES} states")
            row.append(numbers[after])
        rows.append(row)
        accepting.append(matcher.accepts(state) != pattern.negated)
    return _merge_equal_states(Automaton(np.array(rows, dtype=np.int32), np.array(accepting)))


def _character_automaton(pattern: Pattern) -> FSM:
    """Over characters and marks, by interegular."""
    body = "".join(_marked(pattern.expression, END if pattern.whole else f"\\n?{END}"))
    flags = re.match(r"\(\?([a-zA-Z]+)\)", body)
    letters = set(flags[1]) if flags else set()
    if letters - set("is"):
        raise CannotCompile(f"the flags {flags[1]!r} of {pattern.expression!r}" if flags else "")
    body = body[flags.end() :] if flags else body
    if "s" in letters:
        body = body.replace(f"[^\\n{MARKS}]", f"[^{MARKS}]")
    if pattern.ignore_case or "i" in letters:
        body = f"(?i:{body})"
    edge = "" if pattern.whole else ANYTHING
    try:
        automaton: FSM = interegular.parse_pattern(f"{edge}(?:{body}){edge}").to_fsm()
        return automaton
    except Exception as error:  # the library raises many kinds; each means that there is no automaton
        raise CannotCompile(f"{pattern.expression!r}: {error}") from error


def _marked(expression: str, end: str) -> Iterator[str]:
    """The expression in pieces: assertions as marks, and classes that would take in marks narrowed."""
    outside = {"^": START, "$": end, ".": f"[^\\n{MARKS}]"}
    escaped = {"b": BOUNDARY, "B": INSIDE, "A": START, "Z": END}
    negated = {"W": "w", "D": "d", "S": "s"}
    i, in_class = 0, False
    while i < len(expression):
        character, following = expression[i], expression[i + 1 : i + 2]
        if character == "\\":
            if not in_class and following in escaped:
                yield escaped[following]
            elif following in negated:
                if in_class:
                    raise CannotCompile(f"the class with \\{following} in {expression!r}")
                yield f"[^\\{negated[following]}{MARKS}]"
            elif following.isdigit() and following != "0":
                raise CannotCompile(f"the back-reference in {expression!r}")
            else:
                yield character + following
            i += 2
            continue
        if in_class:
            in_class = character != "]"
            yield character
        elif character == "[":
            in_class = True
            yield f"[^{MARKS}" if following == "^" else "["
            i += following == "^"
            if expression[i + 1 : i + 2] == "]":  # a bracket at the beginning of a class is itself
                yield "\\]"
                i += 1
        elif expression.startswith((r"(?<!\w)", r"(?!\w)"), i):
            yield NO_WORD_BEFORE if following == "?" and expression[i + 2] == "<" else NO_WORD_AFTER
            i = expression.index(")", i)
        elif expression[i : i + 2] == "(?" and expression[i + 2 : i + 4] in ("<!", "<="):
            raise CannotCompile(f"the lookbehind in {expression!r}")
        elif expression[i : i + 3] in ("(?=", "(?!", "(?P", "(?("):
            raise CannotCompile(f"the group {expression[i : i + 3]}…) in {expression!r}")
        else:
            yield outside.get(character, character)
        i += 1


State = tuple[frozenset[int], str, bytes]
"""States of the character automaton, what stood before (a mark for the beginning), bytes of an unfinished character."""


class _Matcher:
    """Reads bytes: a text's characters, and before each of them the marks whose conditions are met."""

    def __init__(self, automaton: FSM) -> None:
        self.automaton = automaton
        self.moves: dict[Any, dict[Any, Any]] = automaton.map
        self.start: State = (frozenset([automaton.initial]), START, b"")
        known = (symbol for symbol in automaton.alphabet if symbol is not anything_else and symbol not in MARKS)
        self.explicit = {symbol.encode() for symbol in known if ord(symbol) >= 128}
        self.prefixes = {symbol[:i] for symbol in self.explicit for i in range(1, len(symbol))}

    def advance(self, state: State, byte: int) -> State:
        """The state after one more byte; a character that the automaton does not name is read with its first byte."""
        states, before, pending = state
        if byte >= 128:
            pending += bytes([byte])
            if pending in self.explicit:
                return self._read((states, before, b""), pending.decode())
            if pending in self.prefixes:
                return states, before, pending
            is_first = byte >= 192 or len(pending) > 1
            return self._read((states, before, b""), None) if is_first else (states, before, b"")
        if pending:
            states, before, _ = self._read((states, before, b""), None)
        return self._read((states, before, b""), chr(byte))

    def accepts(self, state: State) -> bool:
        """Does a text that ends here match?"""
        states, before, _ = state
        return bool(self._with_marks(states, before, None) & self.automaton.finals)

    def _read(self, state: State, character: str | None) -> State:
        states, before, pending = state
        is_word = character is not None and (character.isalnum() or character == "_")
        after = self._moved(self._with_marks(states, before, "w" if is_word else " "), character)
        return after, "w" if is_word else " ", pending

    def _with_marks(self, states: frozenset[int], before: str, after: str | None) -> frozenset[int]:
        """The states, and those that marks lead to between a word's character, another, or an end of the text."""
        is_boundary = (before == "w") != (after == "w")
        met = [BOUNDARY if is_boundary else INSIDE]
        met += [START] * (before == START) + [END] * (after is None)
        met += [NO_WORD_BEFORE] * (before != "w") + [NO_WORD_AFTER] * (after != "w")
        while True:
            more = states.union(*(self._moved(states, mark) for mark in met))
            if more == states:
                return states
            states = more

    def _moved(self, states: frozenset[int], symbol: str | None) -> frozenset[int]:
        key = anything_else if symbol is None or symbol not in self.automaton.alphabet else symbol
        if symbol is not None and symbol in MARKS and key is anything_else:
            return frozenset()
        transition = self.automaton.alphabet[key]
        moved = (self.moves[state].get(transition) for state in states if state in self.moves)
        return frozenset(state for state in moved if state is not None)


def _merge_equal_states(automaton: Automaton) -> Automaton:
    """The smallest automaton of the same texts (Moore's algorithm), its states numbered from the beginning."""
    blocks = automaton.accepting.astype(np.int64)
    while True:
        rows = np.concatenate([blocks[:, None], blocks[automaton.step]], axis=1)
        _, first, refined = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        refined = refined.reshape(-1)
        if refined.max() == blocks.max():
            break
        blocks = refined
    order = np.argsort(first)  # the beginning is met first
    number = np.argsort(order)
    return Automaton(number[refined[automaton.step[first[order]]]].astype(np.int32), automaton.accepting[first[order]])
