"""How notebooks show draws and texts: a summary, some texts, the data."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence

from xarray import DataTree


class Draws(DataTree):  # type: ignore[no-untyped-call]
    """A DataTree that notebooks show with the summary of its diagnosis and some texts."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        tree: str = super()._repr_html_()  # type: ignore[no-untyped-call]
        if "diagnosis" not in self.attrs:  # a group of the tree
            return tree
        texts = [{"text": text} for text in json.loads(self.attrs.get("texts", "[]"))]
        return summary_html(str(self.attrs["diagnosis"]), texts) + tree


def summary_html(summary: str, rows: Sequence[Mapping[str, object]]) -> str:
    """A paragraph and a table of the rows below it."""
    lines = "<br>".join(html.escape(line) for line in summary.splitlines())
    paragraph = f"<p>{lines}</p>"
    if not rows:
        return paragraph
    columns = list(rows[0])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(_cell(row[name]) for name in columns)}</tr>" for row in rows)
    return f"{paragraph}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"<td>{value:.4g}</td>"
    return f'<td style="text-align: left; white-space: pre-wrap">{html.escape(str(value))}</td>'
