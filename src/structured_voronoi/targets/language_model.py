"""A language model: a network and its tokenizer, from which targets are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.streams import MEMORY
from structured_voronoi.core.user_code import CONTROL_SECONDS
from structured_voronoi.targets.ending import Finish

if TYPE_CHECKING:
    from structured_voronoi.core.contracts import Control
    from structured_voronoi.targets.controlled import ControlledTarget
    from structured_voronoi.targets.text import TextTarget

Controls = Sequence["Control | Callable[[str], Any]"]
"""Controls that all must hold; a function of the text is one, too."""


class LanguageModel:
    """A causal language model: a network and a tokenizer, and nothing else.

    Prompts, lengths and controls belong to `target`, or to a call of `generate`.

    Parameters
    ----------
    network
        A causal language model of transformers.
    tokenizer
        Its tokenizer.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> model = sv.load("bundled")
    >>> same = sv.LanguageModel(model.network, model.tokenizer)
    >>> target = same.target("Near the", max_tokens=6)
    >>> target.length
    6
    """

    origin: tuple[str, str, str] | None = None
    """The name, device and dtype by which `load` made the model."""

    def __init__(self, network: Any, tokenizer: Any) -> None:
        self.network, self.tokenizer = network, tokenizer

    @property
    def name(self) -> str:
        """The name that was loaded, or the class of the network."""
        return self.origin[0] if self.origin else type(self.network).__name__

    @property
    def device(self) -> torch.device:
        device: torch.device = self.network.device
        return device

    @cached_property
    def embeddings(self) -> Float[Tensor, "token d"]:
        """The output embeddings: one object for all targets, so that their geometry is built once."""
        table: Tensor = self.network.get_output_embeddings().weight
        return table.detach() if table.requires_grad else table

    @cached_property
    def input_map(self) -> Float[Tensor, "d d"] | None:
        """A with input table ≈ output table · A, by least squares; None where they are the same table."""
        table_in, table_out = self.network.get_input_embeddings().weight, self.embeddings
        if table_in.data_ptr() == table_out.data_ptr():
            return None
        fitted: Tensor = torch.linalg.lstsq(table_out.float(), table_in.float()).solution.to(table_in)
        return fitted

    @cached_property
    def sampled_tokens(self) -> tuple[Bool[Tensor, " token"], dict[str, int]]:
        """The tokens that texts may have, and how many are left out for each reason.

        Left out are special and unused tokens, and those whose embedding is not finite or equals an earlier one.
        """
        mask = torch.ones(len(self.embeddings), dtype=torch.bool, device=self.device)
        size = len(mask)
        added = {token for token, entry in self.tokenizer.added_tokens_decoder.items() if entry.special}
        mask[[token for token in added | set(self.tokenizer.all_special_ids) if token < size]] = False
        special = size - int(mask.sum())
        used = torch.zeros_like(mask)
        used[[token for token in self.tokenizer.get_vocab().values() if token < size]] = True
        mask &= used
        unused = size - int(mask.sum()) - special
        damaged = mask & ~self.embeddings.isfinite().all(-1)
        mask &= ~damaged
        repeated = _repeated_rows(self.embeddings, mask)
        mask &= ~repeated
        return mask, {
            "special": special,
            "unused": unused,
            "repeated embedding": int(repeated.sum()),
            "embedding not finite": int(damaged.sum()),
        }

    def target(
        self,
        prompt: str = "",
        controls: Controls = (),
        *,
        max_tokens: int = 20,
        finish: Finish = "length",
        stop: str | int | Sequence[str | int] = (),
        suffix: str = "",
        chat: bool = False,
        system: str = "",
        allowed: Sequence[int] | None = None,
        memory: int = MEMORY,
        control_timeout: float | None = CONTROL_SECONDS,
    ) -> TextTarget | ControlledTarget:
        """The distribution of texts after a prompt, for `sample`, `probability`, `Lookahead.fit` and `verify`.

        Parameters
        ----------
        prompt
            Text on the left.
        controls
            What texts must satisfy, all of it: controls such as ``sv.keyword("river")``, or functions of the text.
        max_tokens
            Maximum number of tokens.
        finish
            ``"length"``: exactly ``max_tokens`` tokens, without an end. ``"stop"``: texts that end by themselves within
            ``max_tokens``. ``"any"``: texts that end by themselves or are cut there.
        stop
            Stop strings, or numbers of tokens, that end a text besides the end-of-text token.
        suffix
            Text on the right, for ``finish="length"``: the model fills the gap.
        chat
            The prompt is a user's message in the model's chat format, and texts are answers.
        system
            The system message of a chat.
        allowed
            The only tokens that may be sampled.
        memory
            Bytes that logits may take.
        control_timeout
            Maximum number of seconds for one call of a control; None for no limit.

        Returns
        -------
        TextTarget or ControlledTarget
            A target; the latter if there are controls.

        Raises
        ------
        SamplingError
            If the prompt, the settings or a control do not fit the model.
        """
        from structured_voronoi.targets.text import TextTarget

        made = TextTarget(
            self,
            prompt,
            max_tokens,
            suffix=suffix,
            finish=finish,
            stop=stop,
            chat=chat,
            system=system,
            allowed=allowed,
            memory=memory,
        )
        return made.under(controls, control_timeout) if controls else made

    def recipe(self) -> Any:
        """How another process makes the same model: by loading it again, where that is possible."""
        if self.origin is None or type(self) is not LanguageModel:
            return NotImplemented
        name, device, dtype = self.origin
        return _load_again, (name, device, dtype)


def load(name: str | Path = "bundled", *, device: str = "cpu", dtype: str = "float32") -> LanguageModel:
    """Load a language model.

    Parameters
    ----------
    name
        ``"bundled"``, a name of `svs models ls`, a Hugging Face hub name, a folder, or a .gguf file. Only safetensors
        and GGUF files are read, and no code of the model's is run.
    device
        A torch device.
    dtype
        ``"float32"``, ``"float64"``, ``"bfloat16"`` or ``"float16"``.

    Returns
    -------
    LanguageModel

    Raises
    ------
    SamplingError
        If the model cannot be loaded.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> sv.load("bundled").name
    'bundled'
    """
    from structured_voronoi.models.loading import load_model

    if not isinstance(name, str | Path):
        raise SamplingError(
            f"{name!r} is not the name of a model",
            argument="name",
            remedy="give a name or a folder; wrap a network with sv.LanguageModel(network, tokenizer)",
        )
    loaded = load_model(str(name), device, dtype)
    model = LanguageModel(loaded.network, loaded.tokenizer)
    is_path = str(name) != "bundled" and Path(name).exists()
    model.origin = (str(Path(name).resolve()) if is_path else str(name), device, dtype)
    return model


def as_model(model: Any) -> LanguageModel:
    """The model of this name, or the model itself."""
    if isinstance(model, LanguageModel):
        return model
    if not isinstance(model, str | Path):
        raise SamplingError(
            f"model is a {type(model).__name__}, not a name or a LanguageModel",
            remedy="wrap a network and its tokenizer: sv.LanguageModel(network, tokenizer)",
        )
    return load(model)


def _load_again(name: str, device: str, dtype: str) -> LanguageModel:
    return load(name, device=device, dtype=dtype)


def _repeated_rows(table: Float[Tensor, "token d"], mask: Bool[Tensor, " token"]) -> Bool[Tensor, " token"]:
    """Which rows of the mask equal an earlier one of it: found by hashing, and compared only where hashes agree."""
    repeated: list[int] = []
    seen: set[bytes] = set()
    for tokens in torch.split(mask.nonzero().squeeze(-1), 1024):
        rows = (table.detach()[tokens] + 0.0).cpu()  # adding zero turns -0.0 into 0.0, which it equals
        for token, row in zip(tokens.tolist(), rows.view(torch.uint8).numpy(), strict=True):
            count = len(seen)
            seen.add(row.tobytes())
            if len(seen) == count:
                repeated.append(token)
    found = torch.zeros_like(mask)
    found[repeated] = True
    return found
