"""Patterns as automata over bytes.

An automaton over characters (`automata.expressions`) is converted byte by byte. Non-ASCII characters in the expression
are compiled exactly, and so are the ends of long ranges. Any other character belongs to the classes of most characters
that begin with the same bytes: é counts as a letter and £ does not. Only the proposals of a lookahead depend on this
approximation, not the distribution of the draws.
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


@dataclass(frozen=True, eq=False)
class Automaton:
    """Deterministic automaton over bytes; state 0 is the initial state."""

    step: Int[ndarray, "state 256"]
    accepting: Bool[ndarray, " state"]
    """Whether a text that ends in each state matches."""

    @property
    def satisfied(self) -> Bool[ndarray, " state"]:
        """States from which every continuation matches."""
        kept = self.accepting.copy()
        while (kept & ~kept[self.step].all(-1)).any():
            kept &= kept[self.step].all(-1)
        return kept


@lru_cache(maxsize=64)
def compile_pattern(pattern: Pattern) -> Automaton:
    """Return the minimal automaton of a pattern, found by breadth-first search over bytes.

    Raises
    ------
    CannotCompile
        If the expression has no automaton, or a large one.

    Examples
    --------
    >>> automaton = compile_pattern(Pattern("ab"))
    >>> automaton.step.shape, automaton.accepting.tolist()
    ((3, 256), [False, False, True])
    """
    max_explored, max_states = 2000, 400  # before and after equal states are merged
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
                if len(waiting) > max_explored:
                    raise CannotCompile(f"its automaton has more than {max_explored:,} states")
            row.append(numbers[after])
        rows.append(row)
        accepting.append(reader.accepts(state) != pattern.negated)
    merged = _merge_equal_states(Automaton(np.array(rows, dtype=np.int32), np.array(accepting)))
    if len(merged.step) > max_states:
        raise CannotCompile(f"its automaton has {len(merged.step):,} states, more than {max_states}")
    return merged


Place = tuple[State, bytes]
"""State of the automaton over characters, and the first bytes of an incomplete character."""


class _ByteReader:
    """Automaton over bytes that reads the characters which they encode."""

    def __init__(self, characters: CharacterAutomaton) -> None:
        self.characters = characters
        self.start: Place = (characters.start, b"")
        either_case = {case for letter in characters.named for case in (letter, letter.lower(), letter.upper())}
        named = {letter.encode(errors="ignore") for letter in either_case if len(letter) == 1}
        self.prefixes = {encoded[:i] for encoded in named for i in range(1, len(encoded))}
        self.kinds: dict[bytes, int] = {}

    def advance(self, place: Place, byte: int) -> Place:
        """Return the place after a byte; continuation bytes of a character that was already read change nothing."""
        state, pending = place
        is_continuation = 128 <= byte < 192
        if is_continuation and not pending:
            return state, b""
        if pending and not is_continuation:  # incomplete character
            state, pending = self.characters.advance(state, self._kinds_of(pending)), b""
        encoded = pending + bytes([byte])
        if encoded in self.prefixes:
            return state, encoded
        return self.characters.advance(state, self._kinds_of(encoded)), b""

    def accepts(self, place: Place) -> bool:
        """Return whether a text that ends here matches."""
        return self.characters.accepts(place[0])

    def _kinds_of(self, encoded: bytes) -> int:
        """Return the classes of most characters that begin with these bytes."""
        if encoded not in self.kinds:
            self.kinds[encoded] = Counter(map(self.characters.kinds, _characters_from(encoded))).most_common(1)[0][0]
        return self.kinds[encoded]


def _characters_from(encoded: bytes) -> list[str]:
    """Return up to 256 of the characters that begin with these bytes; U+FFFD if there are none."""
    first = encoded[0]
    if first < 128:
        return [chr(first)]
    for lowest, own_bits, later_bits in ((240, 3, 18), (224, 4, 12), (192, 5, 6)):
        if first >= lowest:
            begin = (first & ((1 << own_bits) - 1)) << later_bits
            for byte in encoded[1:]:
                later_bits -= 6
                begin |= (byte & 63) << later_bits
            codes = range(begin, min(begin + (1 << later_bits), 0x110000), max(1, (1 << later_bits) // 256))
            return [chr(code) for code in codes if len(codes) == 1 or chr(code).isprintable()] or ["\ufffd"]
    return ["\ufffd"]


def _merge_equal_states(automaton: Automaton) -> Automaton:
    """Return the minimal equivalent automaton (Moore's algorithm), with state 0 as its initial state."""
    steps = np.unique(automaton.step, axis=1)  # one column for all bytes with the same steps
    blocks = automaton.accepting.astype(np.int64)
    while True:
        rows = np.concatenate([blocks[:, None], blocks[steps]], axis=1)
        _, first, refined = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        refined = refined.reshape(-1)
        if refined.max() == blocks.max():
            break
        blocks = refined
    order = np.argsort(first)  # the initial state comes first
    number = np.argsort(order)
    return Automaton(number[refined[automaton.step[first[order]]]].astype(np.int32), automaton.accepting[first[order]])
