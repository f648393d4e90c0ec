"""What a notebook shows of draws and of texts: a short summary with sample texts."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence

from xarray import DataTree


class Draws(DataTree):  # type: ignore[no-untyped-call]
    """A DataTree like any other, but that a notebook shows its diagnosis and some of its texts first."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        tree: str = super()._repr_html_()  # type: ignore[no-untyped-call]
        if "diagnosis" not in self.attrs:  # a group of it
            return tree
        texts = [{"text": text} for text in json.loads(self.attrs.get("texts", "[]"))]
        return summary_html(str(self.attrs["diagnosis"]), texts) + tree


def summary_html(words: str, rows: Sequence[Mapping[str, object]]) -> str:
    """A paragraph, and a table of the rows below it."""
    said = f"<p>{html.escape(words)}</p>"
    if not rows:
        return said
    columns = list(rows[0])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(_cell(row[name]) for name in columns)}</tr>" for row in rows)
    return f"{said}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"<td>{value:.4g}</td>"
    return f'<td style="text-align: left; white-space: pre-wrap">{html.escape(str(value))}</td>'
