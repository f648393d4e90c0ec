"""Patterns as automata over bytes, which tokens consist of.

An automaton over characters (`automata.expressions`) is followed byte by byte. Characters beyond ASCII that the
expression names are told apart by all their bytes, and so are those at the ends of its long ranges; any other is read
as soon as its bytes differ from theirs, as what most characters that begin with these bytes are: é is a letter and £ is
none. A lookahead may be wrong about ª; the draws are right all the same.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Int
from numpy import ndarray

from structured_voronoi.automata.expressions import CannotCompile as CannotCompile
from structured_voronoi.automata.expressions import CharacterAutomaton, State
from structured_voronoi.core.contracts import Pattern

MOST_STATES = 400
"""Larger automata are not worth a head for each of their states."""
MOST_EXPLORED = 2000
"""States that are looked at before those that are equal are merged."""
NO_CHARACTER = "\ufffd"
EXAMPLES = 256
"""Characters by which it is decided what those that begin with a byte are like."""


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


@lru_cache(maxsize=64)
def compile_pattern(pattern: Pattern) -> Automaton:
    """The automaton of a pattern, by breadth-first search over bytes from the beginning of a text; kept, as several
    places of a run ask for it."""
    try:
        reader = _ByteReader(CharacterAutomaton(pattern))
    except (RecursionError, OverflowError, re.error) as error:
        raise CannotCompile(f"{type(error).__name__}: {error}") from error
    numbers, rows, accepting = {reader.start: 0}, [], []
    waiting = [reader.start]
    for state in waiting:  # grows as it goes
        row = []
        for byte in range(256):
            after = reader.advance(state, byte)
            if after not in numbers:
                numbers[after] = len(numbers)
                waiting.append(after)
                if len(waiting) > MOST_EXPLORED:
                    raise CannotCompile(f"its automaton has more than {MOST_EXPLORED:,} states")
            row.append(numbers[after])
        rows.append(row)
        accepting.append(reader.accepts(state) != pattern.negated)
    merged = _merge_equal_states(Automaton(np.array(rows, dtype=np.int32), np.array(accepting)))
    if len(merged.step) > MOST_STATES:
        raise CannotCompile(f"its automaton has {len(merged.step):,} states, more than {MOST_STATES}")
    return merged


Place = tuple[State, bytes]
"""The state of the automaton over characters, and the bytes of a character that it does not know yet."""


class _ByteReader:
    """Reads bytes as the characters that they spell."""

    def __init__(self, characters: CharacterAutomaton) -> None:
        self.characters = characters
        self.start: Place = (characters.start, b"")
        either_case = {case for letter in characters.named for case in (letter, letter.lower(), letter.upper())}
        named = {letter.encode(errors="ignore") for letter in either_case if len(letter) == 1}
        self.beginnings = {spelt[:i] for spelt in named for i in range(1, len(spelt))}
        self.kinds: dict[bytes, int] = {}

    def advance(self, place: Place, byte: int) -> Place:
        """The place after one more byte; a continuation of a character that has been read changes nothing."""
        state, pending = place
        is_continuation = 128 <= byte < 192
        if is_continuation and not pending:
            return state, b""
        if pending and not is_continuation:  # a character is broken off
            state, pending = self.characters.advance(state, self._kinds_of(pending)), b""
        spelt = pending + bytes([byte])
        if spelt in self.beginnings:
            return state, spelt
        return self.characters.advance(state, self._kinds_of(spelt)), b""

    def accepts(self, place: Place) -> bool:
        """Does a text that ends here match?"""
        return self.characters.accepts(place[0])

    def _kinds_of(self, spelt: bytes) -> int:
        """The classes of most characters that begin with these bytes."""
        if spelt not in self.kinds:
            self.kinds[spelt] = Counter(map(self.characters.kinds, _characters_from(spelt))).most_common(1)[0][0]
        return self.kinds[spelt]


def _characters_from(spelt: bytes) -> list[str]:
    """Some of the characters that begin with these bytes; the sign for no character if none does."""
    first = spelt[0]
    if first < 128:
        return [chr(first)]
    for lowest, own_bits, later_bits in ((240, 3, 18), (224, 4, 12), (192, 5, 6)):
        if first >= lowest:
            begin = (first & ((1 << own_bits) - 1)) << later_bits
            for byte in spelt[1:]:
                later_bits -= 6
                begin |= (byte & 63) << later_bits
            codes = range(begin, min(begin + (1 << later_bits), 0x110000), max(1, (1 << later_bits) // EXAMPLES))
            return [chr(code) for code in codes if len(codes) == 1 or chr(code).isprintable()] or [NO_CHARACTER]
    return [NO_CHARACTER]


def _merge_equal_states(automaton: Automaton) -> Automaton:
    """The smallest automaton of the same texts (Moore's algorithm), its states numbered from the beginning."""
    steps = np.unique(automaton.step, axis=1)  # bytes that do the same everywhere are looked at once
    blocks = automaton.accepting.astype(np.int64)
    while True:
        rows = np.concatenate([blocks[:, None], blocks[steps]], axis=1)
        _, first, refined = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        refined = refined.reshape(-1)
        if refined.max() == blocks.max():
            break
        blocks = refined
    order = np.argsort(first)  # the beginning is met first
    number = np.argsort(order)
    return Automaton(number[refined[automaton.step[first[order]]]].astype(np.int32), automaton.accepting[first[order]])
