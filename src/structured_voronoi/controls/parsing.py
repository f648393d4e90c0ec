"""Controls as they are written on the command line.

* ``food=Italian``: a bundled classifier and one of its labels;
* ``keyword=river``, ``regex=^The``: words in the text, a regular expression;
* ``words=5..12``, ``characters=..80``: bounds of its length; one number alone is both of them;
* ``only=a,cheap,pub``: the text has no words but these;
* ``./folder=label``: a classifier by `svs train classifier`, or a Hugging Face sequence classifier (also by hub name,
  ``owner/name=label``);
* ``module:function``: a Python function of the text, or a control of your own, imported from where you are;
* ``not keyword=river``: the opposite of any of these but a classifier.

A weight may follow: ``food=Italian@1.5``; a pattern that itself ends in @ and a number needs one: ``regex=a@2@1``.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from structured_voronoi.controls import bundled_controls, texts
from structured_voronoi.controls.labels import label
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.core.contracts import Control
from structured_voronoi.core.errors import SamplingError, did_you_mean
from structured_voronoi.core.user_code import user_code
from structured_voronoi.core.validation import is_folder


def parse_control(text: str, device: str = "cpu") -> Control:
    """The control that a text describes, with its weight."""
    written, weight = _split_weight(text.strip())
    if written.startswith("not "):
        control = parse_control(f"{written[4:].strip()}@1", device)
        if not isinstance(control, Predicate):
            raise SamplingError(
                f"the control {written!r} negates a classifier",
                remedy="use one of its other labels, or negate another kind of control",
            )
        return replace(~control, weight=weight)
    name, equals, value = written.partition("=")
    if name == "keyword" and equals:
        return texts.keyword(value, weight=weight)
    if name == "regex" and equals:
        return texts.regex(value, weight=weight)
    if not equals and ":" in name:
        return _weighted(_import_control(name), name, weight)
    if name == "words" and equals:
        return texts.words(*_parse_bounds(name, value), weight=weight)
    if name == "characters" and equals:
        return texts.characters(*_parse_bounds(name, value), weight=weight)
    if name == "only" and equals:
        return texts.only(value.split(","), weight=weight)
    known = [*bundled_controls(), "keyword", "regex", "words", "characters", "only"]
    if "/" in name or "\\" in name or name.startswith(".") or (name and name not in known and is_folder(name)):
        folder, equals, value = written.rpartition("=")
        if not equals or not value:
            raise SamplingError(
                f"the control {text!r} names no label",
                remedy=f"write {written.rstrip('=')}=LABEL",
            )
        return label(folder, value, weight=weight, device=device)
    if name not in known:
        raise SamplingError(
            f"the control {text!r} is unknown",
            remedy=f"{did_you_mean(name, known)}; or ./folder=label, or module:function",
        )
    if not value:
        raise SamplingError(
            f"the control {text!r} names no value",
            remedy=f"write {name}=VALUE, as listed by `svs ls`",
        )
    return label(name, value, weight=weight, device=device)


def _weighted(imported: Any, name: str, weight: float) -> Control:
    """A function or control of the user's with a weight."""
    if not isinstance(imported, Control):
        return Predicate(imported, name, weight=weight)
    return imported if weight == 1.0 else texts.with_weight(imported, weight * getattr(imported, "weight", 1.0))


def _parse_bounds(name: str, written: str) -> tuple[int, int | None]:
    """The two numbers of 5..12, of which one may be missing; 5 alone is 5..5."""
    least, dots, most = (part.strip() for part in written.partition(".."))
    if not (least or most) or not all(re.fullmatch(r"[0-9]{0,9}", part) for part in (least, most)):
        raise SamplingError(
            f"{name}={written} has no bounds",
            remedy=f"write {name}=5..12, {name}=..12, {name}=5.. or {name}=5",
        )
    return int(least or 0), int(most) if most else None if dots else int(least)


def _split_weight(text: str) -> tuple[str, float]:
    """The text before the last @ and the number after it; all of the text and 1 if no number follows."""
    before, at, after = text.rpartition("@")
    if at:
        try:
            weight = float(after)
        except ValueError:
            return text, 1.0
        if not 0 <= weight < math.inf:
            raise SamplingError(
                f"the weight {after} of the control {before!r} is not a number ≥ 0",
                remedy=f"write {before}@1.5",
            )
        return before, weight
    return text, 1.0


def _import_control(written: str) -> Any:
    """Import the function or control `module:name`; the module may be in the current folder.

    The current folder comes last on ``sys.path``, which workers receive too, so that its files never replace installed
    modules that are imported later.
    """
    module, _, name = written.partition(":")
    folder = str(Path.cwd())
    if "" not in sys.path and folder not in sys.path:
        sys.path.append(folder)
    remedy = "run the command where the file is"
    with user_code(f"the control {written!r}: {module}", remedy, what="cannot be imported"):
        attribute = getattr(importlib.import_module(module), name, None)
    _check_module_in(Path(folder), module.partition(".")[0], written)
    if not callable(attribute) and not isinstance(attribute, Control):
        raise SamplingError(
            f"the control {written!r}: {module} has no function or control {name!r}",
            remedy="check its name",
        )
    return attribute


def _check_module_in(folder: Path, name: str, written: str) -> None:
    """Raise an error if the folder has a module of this name, and another one was imported."""
    imported = getattr(sys.modules.get(name), "__file__", None)
    for path in (folder / name / "__init__.py", folder / f"{name}.py"):
        if path.is_file():
            if imported is None or os.path.realpath(imported) != os.path.realpath(path):
                raise SamplingError(
                    f"the control {written!r}: Python imports another module {name} ({imported or 'built in'}) and "
                    f"not {path}",
                    remedy="rename that file or folder",
                )
            return
