"""What `generate` returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from structured_voronoi.diagnostics.diagnosis import Diagnosis
from structured_voronoi.engine.texts import Text
from structured_voronoi.metrics.probability import Probability

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class Generation:
    """Texts, prompt by prompt, with what the run found out; ``len`` and iteration are those of ``texts``.

    Examples
    --------
    >>> import structured_voronoi as sv
    >>> result = sv.generate("bundled", "Near the", n=2, max_tokens=8, progress=False)
    >>> len(result), result.diagnostics.ok
    (2, True)
    >>> list(result.to_pandas().columns)[:4]
    ['prompt', 'index', 'text', 'tokens']
    """

    draws: list[Text]
    """Texts with their tokens, log-probabilities and controls."""
    diagnostics: Diagnosis
    probability: list[Probability] = field(default_factory=list)
    """P(controls) for each prompt; empty where Markov chains drew the texts."""
    error_bound: list[float] = field(default_factory=list)
    """For each prompt, a 95 % upper limit of the total variation distance from the exact distribution."""
    evaluations: int = 0
    """Texts that were drawn from proposals, or evaluated by chains."""

    @property
    def texts(self) -> list[str]:
        """The texts without their prompts."""
        return [draw.text for draw in self.draws]

    def __len__(self) -> int:
        return len(self.draws)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def to_pandas(self) -> DataFrame:
        """A row for each text, with the keys of a JSONL line as columns.

        Returns
        -------
        pandas.DataFrame
        """
        import pandas

        return pandas.DataFrame([draw.line() for draw in self.draws])

    def to_jsonl(self, path: str | Path) -> None:
        """Write a line of JSON for each text, as `svs sample --out` does.

        Parameters
        ----------
        path
            The file, which is replaced.
        """
        lines = [json.dumps(draw.line(), ensure_ascii=False, allow_nan=False) + "\n" for draw in self.draws]
        Path(path).write_text("".join(lines), encoding="utf-8")

    def __repr__(self) -> str:
        """The status and the first texts, one per line."""
        shown = [" ".join(f"{draw.prompt}{draw.text}".split()) for draw in self.draws[:8]]
        more = [f"… and {len(self) - 8} more in .texts"] if len(self) > 8 else []
        return "\n".join([self.diagnostics.summary(), *shown, *more])

    def _repr_html_(self) -> str:
        """The same as a table in notebooks."""
        from structured_voronoi.diagnostics.notebook import summary_html

        rows = [{key: value for key, value in draw.line().items() if key != "tokens"} for draw in self.draws[:8]]
        return summary_html(self.diagnostics.summary(), rows)
