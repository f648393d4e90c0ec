"""Automata over the tokens of a vocabulary, made from automata over bytes."""

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


@lru_cache(maxsize=2)
def token_bytes(tokenizer: Any, size: int) -> list[bytes]:
    """Return the bytes that each token adds to a text; b"" for special tokens and unused numbers.

    Raises
    ------
    CannotCompile
        If the text of several tokens is not the concatenation of their bytes, for example where the tokenizer puts
        spaces between words.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CannotCompile("this tokenizer has no table of the bytes of tokens")
    decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder") or {}
    is_byte_level = "ByteLevel" in json.dumps(decoder)
    letters = _byte_letters()
    byte_strings = [b""] * size
    special = set(tokenizer.all_special_ids)
    for word, token in tokenizer.get_vocab().items():
        if token >= size or token in special:
            continue
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", word)
        if is_byte_level and all(letter in letters for letter in word):
            byte_strings[token] = bytes(letters[letter] for letter in word)
        elif byte:
            byte_strings[token] = bytes([int(byte[1], 16)])
        else:
            byte_strings[token] = word.replace("▁", " ").encode()
    _check_concatenation(tokenizer, byte_strings)
    return byte_strings


def _check_concatenation(tokenizer: Any, byte_strings: list[bytes]) -> None:
    """Compare 256 tokens with the tokenizer's text of them; it may omit a space before the first."""
    whole = [token for token, word in enumerate(byte_strings) if word and word.decode(errors="ignore").encode() == word]
    some = whole[:: max(1, len(whole) // 256)]
    written = str(tokenizer.decode(some, clean_up_tokenization_spaces=False))
    if written.lstrip(" ") != b"".join(byte_strings[token] for token in some).decode().lstrip(" "):
        raise CannotCompile("this tokenizer does not concatenate the texts of tokens")


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter in byte-level vocabularies: itself if printable, else a letter after 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenAutomaton:
    """Deterministic automaton over tokens.

    Parameters
    ----------
    following
        Next state of each state and token.
    accepting
        Whether a text that ends in each state matches.
    satisfied
        Whether every continuation from each state matches.
    length
        Largest number of tokens for which ``reachable`` is computed.
    """

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
    def from_bytes(
        cls,
        automaton: Automaton,
        byte_strings: list[bytes],
        length: int,
        device: torch.device | str,
        end: int | None = None,
    ) -> Self:
        """Return the automaton that reads the bytes of tokens.

        The token ``end``, if there is one, is not read: it leads to a final state that accepts if the text matches.
        """
        steps, accepting, satisfied = _token_steps(automaton, byte_strings), automaton.accepting, automaton.satisfied
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
        """Whether any text of this length matches."""
        return bool(self.reachable[-1, 0])

    @property
    def live(self) -> Int[Tensor, " live"]:
        """States from which a match is possible but not certain."""
        return (~self.satisfied & self.reachable.any(0)).nonzero().squeeze(-1)

    def states_after(self, tokens: Int[Tensor, "row n"]) -> Int[Tensor, " row"]:
        """Return the state after each row of tokens."""
        state = tokens.new_zeros(len(tokens))
        for column in tokens.unbind(-1):
            state = self.next[state, column].long()
        return state

    def _reachable(self, length: int) -> Tensor:
        """Return from which states an accepting one is reachable in exactly 0, 1, …, ``length`` tokens."""
        rows = [self.accepting]
        for _ in range(length):
            rows.append(rows[-1][self.next.long()].any(-1))
        return torch.stack(rows)


def can_all_match(automata: Sequence[TokenAutomaton], length: int) -> bool:
    """Return whether some text of this length matches all automata; also True if there are too many states to tell."""
    tables = torch.unique(torch.cat([automaton.next for automaton in automata]), dim=1)
    following = [table.cpu().numpy() for table in tables.split([len(automaton.next) for automaton in automata])]
    reachable = [automaton.reachable.cpu().numpy() for automaton in automata]
    satisfied = [automaton.satisfied.cpu().numpy() for automaton in automata]

    def all_hold(parts: list[ndarray], states: Int[ndarray, "case automaton"]) -> Bool[ndarray, " case"]:
        held: ndarray = np.all([part[column] for part, column in zip(parts, states.T, strict=True)], axis=0)
        return held

    states, max_cases = np.zeros((1, len(automata)), dtype=np.int64), 20_000  # a row for each reachable combination
    for left in reversed(range(length)):
        steps = [table[column] for table, column in zip(following, states.T, strict=True)]
        states = np.unique(np.stack(steps, axis=-1).reshape(-1, len(automata)), axis=0)
        states = states[all_hold([part[left] for part in reachable], states)]
        if not len(states) or len(states) * tables.shape[1] > max_cases or all_hold(satisfied, states).any():
            return bool(len(states))
    return True


def _token_steps(automaton: Automaton, byte_strings: list[bytes]) -> Int[ndarray, "state token"]:
    """Return the next state of every state and token, computed byte by byte for all of them together."""
    longest = max(map(len, byte_strings))
    letters = np.zeros((len(byte_strings), longest), dtype=np.int64)
    for token, word in enumerate(byte_strings):
        letters[token, : len(word)] = np.frombuffer(word, dtype=np.uint8)
    lengths = np.array([len(word) for word in byte_strings])
    state = np.repeat(np.arange(len(automaton.step), dtype=np.int32)[:, None], len(byte_strings), axis=1)
    for column in range(longest):
        inside = lengths > column
        state[:, inside] = automaton.step[state[:, inside], letters[inside, column]]
    return state


def stop_steps(stops: list[str], tokenizer: Any, allowed: list[bool], length: int) -> Int[ndarray, "state token"]:
    """Return the steps of a search for any of these strings; the last state is that of a found string."""
    try:
        pairs = zip(token_bytes(tokenizer, len(allowed)), allowed, strict=True)
    except CannotCompile as error:
        raise SamplingError(
            f"cannot search for the stop string {stops[0]!r}",
            cause=error,
            remedy="use the number of a token instead",
        ) from error
    byte_strings = [word if is_allowed else b"" for word, is_allowed in pairs]
    for stop in stops:
        if not _can_be_found(_search_steps([stop], byte_strings), length):
            raise SamplingError(
                f"the stop string {stop!r} is impossible: no {length} tokens of this vocabulary contain it",
                remedy="remove it",
            )
    return _search_steps(stops, byte_strings)


def _search_steps(stops: list[str], byte_strings: list[bytes]) -> Int[ndarray, "state token"]:
    try:
        automaton = compile_pattern(Pattern("|".join(map(re.escape, stops))))
    except CannotCompile as error:
        raise SamplingError(
            "cannot search for the stop strings", cause=error, remedy="use fewer or shorter stop strings"
        ) from error
    (found,) = np.flatnonzero(automaton.satisfied)  # a minimal automaton has one such state
    order = np.append(np.delete(np.arange(len(automaton.step)), found), found)
    steps = _token_steps(automaton, byte_strings)
    renumbered: ndarray = np.argsort(order).astype(steps.dtype)[steps[order]]
    return renumbered


def _can_be_found(steps: Int[ndarray, "state token"], length: int) -> bool:
    found = np.arange(len(steps)) == len(steps) - 1
    for _ in range(length):
        found = found[steps].any(-1)
    return bool(found[0])
