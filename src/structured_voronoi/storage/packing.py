"""Nested data as bytes and back: tensors as safetensors, everything else as JSON in their header; nothing is pickled.

States of samplers are NamedTuples of NamedTuples. They are rebuilt in the shape of a template, the first state of the
sampler: it has the types of the NamedTuples and the constants of the run, which are not saved.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from structured_voronoi.core.errors import SamplingError


def pack(value: Any, template: Any = None, name: str = "value") -> bytes:
    """Encode tensors, arrays, numbers, strings and bytes in tuples, lists and dicts.

    Parameters
    ----------
    value
        The data.
    template
        A value with the same NamedTuples and constants; `unpack` needs the same.
    name
        What errors call the data.

    Returns
    -------
    bytes
        The bytes of a safetensors file.

    Raises
    ------
    SamplingError
        If a part of the data is of another type.

    Examples
    --------
    >>> unpack(pack({"steps": 3, "tokens": torch.tensor([1, 2])}))
    {'steps': 3, 'tokens': tensor([1, 2])}
    """
    tensors: dict[str, Tensor] = {}
    described = _describe_node(value, template, name, tensors)
    copies = {key: part.detach().cpu().clone(memory_format=torch.contiguous_format) for key, part in tensors.items()}
    return save(copies, {"value": json.dumps(described)})


def check_storable(value: Any, name: str) -> None:
    """Raise an error if `pack` would refuse the value."""
    _describe_node(value, value, name, {})


def unpack(data: bytes, template: Any = None, device: torch.device | str = "cpu") -> Any:
    """Decode what `pack` encoded, with the NamedTuples and constants of the template."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # its length is in the first 8 bytes
    return _rebuild_node(json.loads(header["__metadata__"]["value"]), template, load(data), device)


def _describe_node(value: Any, template: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Describe a value as JSON; its tensors go into ``tensors``, and errors name its path."""
    if _is_plain(value):
        return {"plain": value}
    if isinstance(value, Tensor) and not value.is_complex() and value.layout == torch.strided:
        return {"tensor": _add_tensor(value, tensors)}
    if type(value) is bytes:
        return {"bytes": _add_tensor(torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy()), tensors)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {"array": _add_tensor(torch.from_numpy(np.array(value)), tensors)}
    if isinstance(value, tuple):
        like = template if isinstance(template, tuple) and len(template) == len(value) else (None,) * len(value)
        names = getattr(value, "_fields", range(len(value)))
        if hasattr(value, "_fields") and type(template) is not type(value):
            raise SamplingError(
                f"{path} is a {type(value).__name__} and was a {type(template).__name__} in the first state",
                remedy=f"let `init` return a {type(value).__name__} there",
            )
        parts = zip(names, value, like, strict=True)
        return {"tuple": [_describe_node(part, its, f"{path}.{key}", tensors) for key, part, its in parts]}
    if isinstance(value, list):
        return {"list": [_describe_node(part, None, f"{path}.{i}", tensors) for i, part in enumerate(value)]}
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {"dict": {key: _describe_node(part, None, f"{path}.{key}", tensors) for key, part in value.items()}}
    if is_constant(value) and type(value) is type(template):
        return {"constant": type(value).__name__}
    raise SamplingError(
        f"{path} is of type {type(value).__name__}, which cannot be saved",
        remedy="use tensors, numbers and strings, and a frozen dataclass for what never changes",
    )


def _add_tensor(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    """Add a tensor and return its name: a number, because keys of dicts may contain any character."""
    name = str(len(tensors))
    tensors[name] = tensor
    return name


def _rebuild_node(described: dict[str, Any], template: Any, tensors: dict[str, Tensor], device: Any) -> Any:
    [(kind, content)] = described.items()
    if kind == "plain":
        return content
    if kind == "tensor":
        return tensors[content].to(template.device if isinstance(template, Tensor) else device)
    if kind == "array":
        return tensors[content].numpy()[()]
    if kind == "bytes":
        return tensors[content].numpy().tobytes()
    if kind == "constant":
        return template
    if kind == "tuple":
        like = template if isinstance(template, tuple) and len(template) == len(content) else (None,) * len(content)
        parts = [_rebuild_node(part, its, tensors, device) for part, its in zip(content, like, strict=True)]
        return type(template)(*parts) if hasattr(template, "_fields") else tuple(parts)
    if kind == "list":
        return [_rebuild_node(part, None, tensors, device) for part in content]
    return {key: _rebuild_node(part, None, tensors, device) for key, part in content.items()}


def is_constant(value: Any) -> bool:
    """True for a frozen dataclass, which `init` of a sampler makes and no step changes."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _is_plain(value: Any) -> bool:
    """True if the value is the same after it was written as JSON and read again."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(part) for key, part in value.items())
    return value is None or type(value) in (bool, int, float, str)


def describe(value: Any) -> Any:
    """A setting as JSON, equal if and only if the setting is; tensors, networks and long lists by their digests."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        items = [describe(part) for part in value]
        text = json.dumps(items)
        if len(text) > 1000:
            return f"{len(items)} items, digest {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        return items
    if isinstance(value, dict):
        return {str(key): describe(part) for key, part in value.items()}
    if isinstance(value, Tensor):
        return f"tensor {digest({'': value})}"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {digest(value.state_dict())}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    return getattr(value, "__qualname__", type(value).__qualname__)


def describe_sampler(sampler: Any) -> Any:
    """The settings of a sampler, which need not be a dataclass."""
    if dataclasses.is_dataclass(sampler):
        return describe(sampler)
    attributes = getattr(sampler, "__dict__", {})
    return {"class": type(sampler).__qualname__, **{name: describe(part) for name, part in attributes.items()}}


def digest(tensors: dict[str, Any]) -> str:
    """Sixteen hexadecimal digits of a checksum of tensors."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        data = torch.as_tensor(tensor).detach().cpu().contiguous()
        found.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
        found.update(data.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def describe_changes(base: Any, made: Any, path: str, put: Callable[[Any], str | None]) -> Any:
    """How a tuned sampler differs from the given one, as JSON.

    ``put`` saves a lookahead and returns its name; it returns None for anything else.
    """
    if made is base:
        return {}
    if (name := put(made)) is not None:
        return {"lookahead": name}
    if _is_plain(made):
        return {"plain": made}
    if isinstance(made, tuple) and isinstance(base, tuple) and len(made) == len(base):
        parts = enumerate(zip(base, made, strict=True))
        return {"tuple": [describe_changes(one, other, f"{path}.{i}", put) for i, (one, other) in parts]}
    if is_constant(made) and type(made) is type(base):
        names = [field.name for field in dataclasses.fields(made)]
        pairs = ((name, getattr(base, name), getattr(made, name)) for name in names)
        return {"fields": {name: describe_changes(one, other, f"{path}.{name}", put) for name, one, other in pairs}}
    raise SamplingError(
        f"{path} was tuned to a {type(made).__name__}, which cannot be saved",
        remedy="make the sampler a frozen dataclass whose tuned fields are numbers, strings or a Lookahead",
    )


def apply_changes(base: Any, described: dict[str, Any], get: Callable[[str], Any]) -> Any:
    """The tuned sampler, from the given one and a description of the differences."""
    for kind, content in described.items():
        if kind == "plain":
            return content
        if kind == "lookahead":
            return get(content)
        if kind == "tuple":
            return tuple(apply_changes(one, part, get) for one, part in zip(base, content, strict=True))
        made = copy.copy(base)
        for name, part in content.items():
            object.__setattr__(made, name, apply_changes(getattr(base, name), part, get))
        return made
    return base
