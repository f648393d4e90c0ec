"""Tokens of prompts, conversations and suffixes."""

from __future__ import annotations

from typing import Any

from structured_voronoi.core.errors import SamplingError, one_line


def check_text(argument: str, text: object) -> None:
    """Raise an error unless the argument is a str of valid Unicode: undecodable bytes become lone surrogates."""
    if not isinstance(text, str):
        raise SamplingError(f"{text!r} is not a str", argument=argument, remedy="give a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SamplingError(
            f"{text[:80]!r} is not UTF-8 at character {error.start}", argument=argument, remedy="write it in UTF-8"
        ) from error


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of a prompt, with a beginning-of-text token in front if the tokenizer has one.

    An empty prompt begins with the end-of-text token if there is no beginning-of-text token.

    Raises
    ------
    SamplingError
        If there would be no token at all.
    """
    check_text("prompt", prompt)
    ids: list[int] = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"] if prompt else []
    first = None if ids and _begins_chat_turns(tokenizer) else tokenizer.bos_token_id
    if first is None and not ids:
        first = tokenizer.eos_token_id
    if first is not None:
        ids = [first, *ids]
    if not ids:
        raise SamplingError("the tokenizer has no beginning-of-text token", remedy="give a prompt")
    return ids


def encode_chat(tokenizer: Any, prompt: str, system: str) -> list[int]:
    """The tokens of a conversation, by the tokenizer's chat template, in which the model's turn comes next."""
    check_text("prompt", prompt)
    check_text("system", system)
    ids: list[int] = tokenizer(_render(tokenizer, prompt, system), add_special_tokens=False)["input_ids"]
    return ids


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that ends the model's turn: the first special token after an answer, else the end-of-text token."""
    placeholder = "ANSWER"
    _, _, after = _render(tokenizer, "", "", placeholder).rpartition(placeholder)
    special = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    found: int | None = next((token for token in ids if token in special), tokenizer.eos_token_id)
    return found


def encode_suffix(tokenizer: Any, suffix: str) -> list[int]:
    """The tokens of a text that follows another one: some tokenizers add a space before the first word of a text."""
    check_text("suffix", suffix)
    before, both = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (".", "." + suffix))
    if both[: len(before)] == before:
        following: list[int] = both[len(before) :]
        return following
    alone: list[int] = tokenizer(suffix, add_special_tokens=False)["input_ids"]
    return alone


def drops_space(tokenizer: Any) -> bool:
    """Whether decoding drops the space before the first word, as Llama 2's tokenizer does."""
    ids = tokenizer("a b", add_special_tokens=False)["input_ids"]
    return bool(tokenizer.decode(ids) != tokenizer.decode(ids[:1]) + tokenizer.decode(ids[1:]))


def _begins_chat_turns(tokenizer: Any) -> bool:
    """Whether the beginning-of-text token is used for chat turns only, as SmolLM2's is."""
    first, template = tokenizer.bos_token, str(getattr(tokenizer, "chat_template", None) or "")
    is_added = tokenizer("a", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]
    return first is not None and first != tokenizer.eos_token and first in template and not is_added


def _render(tokenizer: Any, prompt: str, system: str, answer: str | None = None) -> str:
    """A conversation as a text: the prompt alone, with the model's turn begun, or the prompt and an answer."""
    if not getattr(tokenizer, "chat_template", None):
        raise SamplingError(
            "the tokenizer has no chat template",
            remedy="sample without chat and system message, or use a model made for chats, for example smollm2",
        )
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer is None)
    except Exception as error:  # templates are programs and fail in many ways
        raise SamplingError(
            "the tokenizer's chat template fails",
            cause=f"{type(error).__name__}: {one_line(error)}",
            remedy="leave the system message out, or use another model",
        ) from error
    return str(rendered)
