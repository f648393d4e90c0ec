"""For the site: examples in docstrings (>>>) become blocks of code; Markdown would take them for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*$\n?(?:^(?!>>> )\S.*$\n?)*)+", flags=re.MULTILINE)


class FencedExamples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        docstring = obj.docstring
        if docstring is not None:
            docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value)
