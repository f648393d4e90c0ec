"""An automaton over bytes as one over tokens: where each token of a vocabulary leads from each state."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy import ndarray
from torch import Tensor

from structured_voronoi.automata.patterns import Automaton, CannotCompile, compile_pattern
from structured_voronoi.core.contracts import Pattern
from structured_voronoi.core.errors import SamplingError

SPACE_MARK = "▁"
CHECKED = 256
"""Tokens whose spelling is compared with the tokenizer's."""
MOST_CASES = 20_000
"""States of several automata together, times kinds of tokens, that are followed at a time."""


@lru_cache(maxsize=2)
def token_bytes(tokenizer: Any, size: int) -> list[bytes]:
    """The bytes that every token adds to a text; none for special tokens and unused numbers.

    Raises `CannotCompile` where texts are not made that way, as by tokenizers that put spaces between words.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CannotCompile("this tokenizer does not tell how it spells tokens")
    decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder") or {}
    is_byte_level = "ByteLevel" in json.dumps(decoder)
    letters = _byte_letters()
    spelt = [b""] * size
    special = set(tokenizer.all_special_ids)
    for word, token in tokenizer.get_vocab().items():
        if token >= size or token in special:
            continue
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", word)
        if is_byte_level and all(letter in letters for letter in word):
            spelt[token] = bytes(letters[letter] for letter in word)
        elif byte:
            spelt[token] = bytes([int(byte[1], 16)])
        else:
            spelt[token] = word.replace(SPACE_MARK, " ").encode()
    _check_spelling(tokenizer, spelt)
    return spelt


def _check_spelling(tokenizer: Any, spelt: list[bytes]) -> None:
    """Compare some tokens in a row with what the tokenizer makes of them; it may leave out a space before the first."""
    whole = [token for token, word in enumerate(spelt) if word and word.decode(errors="ignore").encode() == word]
    some = whole[:: max(1, len(whole) // CHECKED)]
    written = str(tokenizer.decode(some, clean_up_tokenization_spaces=False))
    if written.lstrip(" ") != b"".join(spelt[token] for token in some).decode().lstrip(" "):
        raise CannotCompile("this tokenizer does not write texts token by token")


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies spell bytes: printable ones are themselves, others follow 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenAutomaton:
    """Where each token leads from each state, which texts match, and what can still be reached."""

    def __init__(
        self,
        following: Int[Tensor, "state token"],
        accepting: Bool[Tensor, " state"],
        satisfied: Bool[Tensor, " state"],
        length: int,
    ) -> None:
        self.next, self.accepting, self.satisfied = following, accepting, satisfied
        self.reachable: Bool[Tensor, "left state"] = self._reachable(length)

    @classmethod
    def spelt(
        cls, automaton: Automaton, spelt: list[bytes], length: int, device: torch.device | str, end: int | None = None
    ) -> Self:
        """The automaton that reads the bytes of tokens.

        If texts end with a token, that one is not read: it leads to a state in which the text has matched for good, or
        to one in which it never will.
        """
        steps, accepting, satisfied = _token_steps(automaton, spelt), automaton.accepting, automaton.satisfied
        if end is not None:
            matched, failed = len(steps), len(steps) + 1
            steps[:, end] = np.where(accepting, matched, failed)
            settled = np.repeat(np.array([[matched], [failed]], dtype=steps.dtype), steps.shape[1], axis=1)
            steps = np.concatenate([steps, settled])
            accepting, satisfied = (np.append(part, [True, False]) for part in (accepting, satisfied))
        following, accepts, is_satisfied = (torch.from_numpy(part).to(device) for part in (steps, accepting, satisfied))
        return cls(following, accepts, is_satisfied, length)

    @property
    def is_possible(self) -> bool:
        """Can any text of this length match?"""
        return bool(self.reachable[-1, 0])

    @property
    def live(self) -> Int[Tensor, " live"]:
        """The states of which something is to be learnt: neither satisfied nor lost whatever comes."""
        return (~self.satisfied & self.reachable.any(0)).nonzero().squeeze(-1)

    def states_after(self, tokens: Int[Tensor, "row n"]) -> Int[Tensor, " row"]:
        """The state after each row of tokens."""
        state = tokens.new_zeros(len(tokens))
        for column in tokens.unbind(-1):
            state = self.next[state, column].long()
        return state

    def _reachable(self, length: int) -> Tensor:
        """From which states an accepting one can be reached in exactly so many tokens."""
        rows = [self.accepting]
        for _ in range(length):
            rows.append(rows[-1][self.next.long()].any(-1))
        return torch.stack(rows)


def can_all_match(automata: Sequence[TokenAutomaton], length: int) -> bool:
    """Is there a text of so many tokens that all of them match? Yes, too, where there is too much to follow."""
    tables = torch.unique(torch.cat([automaton.next for automaton in automata]), dim=1)  # tokens that do the same
    following = [table.cpu().numpy() for table in tables.split([len(automaton.next) for automaton in automata])]
    reachable = [automaton.reachable.cpu().numpy() for automaton in automata]
    satisfied = [automaton.satisfied.cpu().numpy() for automaton in automata]

    def all_hold(parts: list[ndarray], states: Int[ndarray, "case automaton"]) -> Bool[ndarray, " case"]:
        held: ndarray = np.all([part[column] for part, column in zip(parts, states.T, strict=True)], axis=0)
        return held

    states = np.zeros((1, len(automata)), dtype=np.int64)  # of every automaton, in every case there is
    for left in reversed(range(length)):
        steps = [table[column] for table, column in zip(following, states.T, strict=True)]
        states = np.unique(np.stack(steps, axis=-1).reshape(-1, len(automata)), axis=0)
        states = states[all_hold([part[left] for part in reachable], states)]
        if not len(states) or len(states) * tables.shape[1] > MOST_CASES or all_hold(satisfied, states).any():
            return bool(len(states))
    return True


def _token_steps(automaton: Automaton, spelt: list[bytes]) -> Int[ndarray, "state token"]:
    """One pass over the columns of the tokens' bytes, for all states and tokens together."""
    longest = max(map(len, spelt))
    letters = np.zeros((len(spelt), longest), dtype=np.int64)
    for token, word in enumerate(spelt):
        letters[token, : len(word)] = np.frombuffer(word, dtype=np.uint8)
    lengths = np.array([len(word) for word in spelt])
    state = np.repeat(np.arange(len(automaton.step), dtype=np.int32)[:, None], len(spelt), axis=1)
    for column in range(longest):
        inside = lengths > column
        state[:, inside] = automaton.step[state[:, inside], letters[inside, column]]
    return state


def stop_steps(stops: list[str], tokenizer: Any, allowed: list[bool], length: int) -> Int[ndarray, "state token"]:
    """Where tokens lead while a text is searched for any of these strings; the last state is that of one found."""
    try:
        pairs = zip(token_bytes(tokenizer, len(allowed)), allowed, strict=True)
    except CannotCompile as error:
        raise SamplingError(
            f"the stop string {stops[0]!r} cannot be searched for",
            cause=error,
            remedy="give the number of a token instead",
        ) from error
    spelt = [word if is_allowed else b"" for word, is_allowed in pairs]
    for stop in stops:
        if not _can_be_found(_search_steps([stop], spelt), length):
            raise SamplingError(
                f"the stop string {stop!r} can never come: no {length} tokens of this vocabulary spell it",
                remedy="leave it out",
            )
    return _search_steps(stops, spelt)


def _search_steps(stops: list[str], spelt: list[bytes]) -> Int[ndarray, "state token"]:
    try:
        automaton = compile_pattern(Pattern("|".join(map(re.escape, stops))))
    except CannotCompile as error:
        raise SamplingError(
            f"the stop strings cannot be searched for ({error})", remedy="give fewer or shorter ones"
        ) from error
    (found,) = np.flatnonzero(automaton.satisfied)  # the smallest automaton has one such state
    order = np.append(np.delete(np.arange(len(automaton.step)), found), found)
    steps = _token_steps(automaton, spelt)
    renumbered: ndarray = np.argsort(order).astype(steps.dtype)[steps[order]]
    return renumbered


def _can_be_found(steps: Int[ndarray, "state token"], length: int) -> bool:
    found = np.arange(len(steps)) == len(steps) - 1
    for _ in range(length):
        found = found[steps].any(-1)
    return bool(found[0])
