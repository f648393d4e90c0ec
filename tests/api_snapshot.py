"""Print the public API: every public name of the package with its signature.

The file ``tests/api.txt`` holds the printed text, and a test compares the two. After an intended change::

    python tests/api_snapshot.py > tests/api.txt
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

PACKAGE = "structured_voronoi"
SOURCE = Path(__file__).parents[1] / "src"
LINE_LENGTH = 100


def api() -> str:
    """The public names in alphabetical order, one block each; those of public modules follow their module."""
    package = griffe.load(PACKAGE, search_paths=[SOURCE], submodules=True)
    return "\n".join(_module_lines(package)) + "\n"


def _module_lines(module: Any) -> Iterator[str]:
    for name in sorted(getattr(importlib.import_module(module.path), "__all__", ())):
        item = module[name]
        item = item.final_target if item.is_alias else item
        path = f"{module.path}.{name}".removeprefix(f"{PACKAGE}.")
        if item.is_module:
            yield from (f"module {path}", "")
            yield from _module_lines(item)
        elif item.is_class:
            yield from (*_class_lines(path, item), "")
        elif item.is_function:
            yield from (*_signature(path, item.parameters, item.returns), "")
        else:
            yield from (f"{path}{_annotation(item)}", "")


def _class_lines(path: str, cls: Any) -> Iterator[str]:
    bases = f" of {', '.join(map(str, cls.bases))}" if cls.bases else ""
    parameters = [parameter for parameter in cls.parameters if parameter.name != "self"]
    yield from _signature(f"class {path}", parameters, ending=bases)
    fields = {parameter.name for parameter in parameters} if "dataclass" in cls.labels else set()
    for name, member in sorted(cls.all_members.items()):
        member = member.final_target if member.is_alias else member
        if name.startswith("_") or (name in fields and member.is_attribute):
            continue
        if member.is_function:
            kind = next((f"{label} " for label in ("classmethod", "staticmethod") if label in member.labels), "")
            first = 0 if kind == "staticmethod " else 1
            yield from _signature(f"    {kind}{name}", list(member.parameters)[first:], member.returns)
        elif member.is_attribute:
            kind = "property " if "property" in member.labels else ""
            yield f"    {kind}{name}{_annotation(member)}"


def _signature(start: str, parameters: Any, returns: Any = None, ending: str = "") -> Iterator[str]:
    """A signature on one line, or with one parameter on each line if it is long."""
    written = list(_written(parameters))
    end = f"){ending}" + (f" -> {returns}" if returns is not None else "")
    line = f"{start}({', '.join(written)}{end}"
    if len(line) <= LINE_LENGTH:
        yield line
        return
    indent = " " * (len(start) - len(start.lstrip()))
    yield f"{start}("
    yield from (f"{indent}    {parameter}," for parameter in written)
    yield f"{indent}{end}"


def _written(parameters: Any) -> Iterator[str]:
    """Parameters as in a ``def``, with its ``/`` and ``*``."""
    kinds = griffe.ParameterKind
    stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}
    before = None
    for parameter in parameters:
        if before is kinds.positional_only and parameter.kind is not before:
            yield "/"
        if parameter.kind is kinds.keyword_only and before not in (kinds.keyword_only, kinds.var_positional):
            yield "*"
        default = "" if parameter.default is None or parameter.kind in stars else f" = {_value(parameter.default)}"
        yield f"{stars.get(parameter.kind, '')}{parameter.name}{_annotation(parameter)}{default}"
        before = parameter.kind
    if before is kinds.positional_only:
        yield "/"


def _annotation(item: Any) -> str:
    return "" if item.annotation is None else f": {item.annotation}"


def _value(default: Any) -> str:
    """A default as written; the value of a constant in place of its name."""
    if isinstance(default, griffe.ExprName):
        try:
            found: Any = default.parent.modules_collection[default.canonical_path]
        except (KeyError, griffe.NameResolutionError):
            return str(default)
        found = found.final_target if found.is_alias else found
        if found.is_attribute and found.value is not None:
            return str(found.value)
    return str(default)


if __name__ == "__main__":
    print(api(), end="")
