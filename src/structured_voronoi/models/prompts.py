"""What a language model reads before the texts that it writes: a prompt, or one side of a conversation."""

from __future__ import annotations

from typing import Any

from structured_voronoi.core.errors import SamplingError, one_line

ANSWER = "ANSWER"
"""Stands for the model's answer where the end of its turn is looked for."""


def check_text(what: str, text: object) -> None:
    """Refuse what is no text, or holds what UTF-8 cannot: bytes of another encoding come as lone surrogates."""
    if not isinstance(text, str):
        raise SamplingError(f"{what} is {text!r} and no text", remedy="give a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SamplingError(
            f"{what} {text[:80]!r} is not UTF-8 at character {error.start}",
            remedy="write it in UTF-8",
        ) from error


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of a prompt, after the token that texts begin with."""
    check_text("the prompt", prompt)
    ids: list[int] = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"] if prompt else []
    first = None if ids and _begins_turns(tokenizer) else tokenizer.bos_token_id
    if first is None and not ids:
        first = tokenizer.eos_token_id
    if first is not None:
        ids = [first, *ids]
    if not ids:
        raise SamplingError("this tokenizer has no token to begin a text with", remedy="give a prompt")
    return ids


def _begins_turns(tokenizer: Any) -> bool:
    """Is the first token of texts one with which the turns of a chat begin, and no other text, as SmolLM2's is?"""
    first, template = tokenizer.bos_token, str(getattr(tokenizer, "chat_template", None) or "")
    puts_it = tokenizer("a", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]
    return first is not None and first != tokenizer.eos_token and first in template and not puts_it


def encode_chat(tokenizer: Any, prompt: str, system: str) -> list[int]:
    """The tokens of a conversation in which the model speaks next, by the tokenizer's own template."""
    check_text("the prompt", prompt)
    check_text("the system message", system)
    ids: list[int] = tokenizer(_render(tokenizer, prompt, system), add_special_tokens=False)["input_ids"]
    return ids


def end_of_turn(tokenizer: Any) -> int | None:
    """The token with which the model ends its turn: the first special one after an answer, else the end of text."""
    _, _, after = _render(tokenizer, "", "", ANSWER).rpartition(ANSWER)
    special = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    found: int | None = next((token for token in ids if token in special), tokenizer.eos_token_id)
    return found


def _render(tokenizer: Any, prompt: str, system: str, answer: str | None = None) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise SamplingError(
            "a chat needs a tokenizer with a chat template, and this one has none",
            remedy="leave --chat and --system out, or take a model that was made for chats, smollm2 for example",
        )
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer is None)
    except Exception as error:  # templates are programs of their own and fail in many ways
        raise SamplingError(
            f"the tokenizer's chat template fails ({type(error).__name__}: {one_line(error)})",
            remedy="leave --system out, or take another model",
        ) from error
    return str(rendered)


def encode_suffix(tokenizer: Any, suffix: str) -> list[int]:
    """The tokens of a text that follows another: some tokenizers put a space before the first word of a text."""
    check_text("the suffix", suffix)
    before, both = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (".", "." + suffix))
    if both[: len(before)] == before:
        following: list[int] = both[len(before) :]
        return following
    alone: list[int] = tokenizer(suffix, add_special_tokens=False)["input_ids"]
    return alone


def drops_space(tokenizer: Any) -> bool:
    """Does the tokenizer, as Llama 2's does, leave out the space before the first word of what it decodes?"""
    ids = tokenizer("a b", add_special_tokens=False)["input_ids"]
    return bool(tokenizer.decode(ids) != tokenizer.decode(ids[:1]) + tokenizer.decode(ids[1:]))
