"""Nested data as bytes and back: tensors as safetensors, everything else as JSON in their header; nothing is pickled.

States of samplers are NamedTuples of NamedTuples. They are rebuilt in the shape of a template, the state that the
sampler begins with: it says which NamedTuple belongs where, and holds the constants of the run, which are not stored.
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

REAL = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64} | {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
HEADER = 8
"""Bytes at the beginning of a safetensors file that say how long its header is."""


LONGEST = 1000
"""Characters of a list that is described item by item; of a longer one its digest suffices."""


def pack(value: Any, template: Any = None, name: str = "value") -> bytes:
    """Tensors, arrays, numbers, words and bytes in tuples, lists and dicts; an error names what cannot be stored."""
    tensors: dict[str, Tensor] = {}
    described = _describe_node(value, template, name, tensors)
    whole = {path: part.detach().cpu().clone(memory_format=torch.contiguous_format) for path, part in tensors.items()}
    return save(whole, {"value": json.dumps(described)})


def check_storable(value: Any, name: str) -> None:
    """Refuse what `pack` would refuse, before any work is done."""
    _describe_node(value, value, name, {})


def unpack(data: bytes, template: Any = None, device: torch.device | str = "cpu") -> Any:
    """What was packed; NamedTuples and constants as the template has them."""
    header = json.loads(data[HEADER : HEADER + int.from_bytes(data[:HEADER], "little")])
    return _rebuild_node(json.loads(header["__metadata__"]["value"]), template, load(data), device)


def _describe_node(value: Any, template: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON that says what stands at a path, which errors name; tensors are put aside."""
    if _is_plain(value):
        return {"plain": value}
    if isinstance(value, Tensor) and value.dtype in REAL and value.layout == torch.strided:
        return {"tensor": _put_aside(value, tensors)}
    if type(value) is bytes:
        return {"bytes": _put_aside(torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy()), tensors)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {"array": _put_aside(torch.from_numpy(np.array(value)), tensors)}
    if isinstance(value, tuple):
        like = template if isinstance(template, tuple) and len(template) == len(value) else (None,) * len(value)
        names = getattr(value, "_fields", range(len(value)))
        if hasattr(value, "_fields") and type(template) is not type(value):
            raise SamplingError(
                f"{path} was a {type(template).__name__} at first",
                remedy=f"begin with a {type(value).__name__}",
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
        f"{path} is of type {type(value).__name__}, which a checkpoint cannot hold",
        remedy="keep tensors, numbers and words there, and what never changes in a frozen dataclass",
    )


def _put_aside(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    """The name under which it is kept: a number, since keys of dicts may hold anything."""
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
    """A frozen dataclass: what a sampler's `init` makes, and no step changes."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _is_plain(value: Any) -> bool:
    """Is it, as it stands, JSON that comes back the same?"""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(part) for key, part in value.items())
    return value is None or type(value) in (bool, int, float, str)


def describe(value: Any) -> Any:
    """A setting as JSON that is the same whenever the setting is; tensors and networks by their digests."""
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        listed = [describe(part) for part in value]
        whole = json.dumps(listed)
        shortened = f"{len(listed)} items, digest {hashlib.sha256(whole.encode()).hexdigest()[:16]}"
        return listed if len(whole) <= LONGEST else shortened
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
    """The settings of a sampler, also of one that is no dataclass."""
    if dataclasses.is_dataclass(sampler):
        return describe(sampler)
    return {"class": type(sampler).__qualname__, **{name: describe(part) for name, part in vars(sampler).items()}}


def digest(tensors: dict[str, Any]) -> str:
    """Sixteen characters that change with any bit of the tensors."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        data = torch.as_tensor(tensor).detach().cpu().contiguous()
        found.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
        found.update(data.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def changes(base: Any, made: Any, path: str, put: Callable[[Any], str | None]) -> Any:
    """How a tuned sampler differs from the one that was given, as JSON.

    ``put`` stores a lookahead elsewhere and returns its name; it returns None for anything else.
    """
    if made is base:
        return {}
    if (name := put(made)) is not None:
        return {"lookahead": name}
    if _is_plain(made):
        return {"plain": made}
    if isinstance(made, tuple) and isinstance(base, tuple) and len(made) == len(base):
        pairs = enumerate(zip(base, made, strict=True))
        return {"tuple": [changes(one, other, f"{path}.{i}", put) for i, (one, other) in pairs]}
    if is_constant(made) and type(made) is type(base):
        names = [field.name for field in dataclasses.fields(made)]
        return {
            "fields": {name: changes(getattr(base, name), getattr(made, name), f"{path}.{name}", put) for name in names}
        }
    raise SamplingError(
        f"{path} was tuned to a {type(made).__name__}, which a checkpoint cannot hold",
        remedy="make the sampler a frozen dataclass whose tuned fields are numbers, words or a Lookahead",
    )


def changed(base: Any, described: dict[str, Any], get: Callable[[str], Any]) -> Any:
    """The tuned sampler again, from the one that was given and how it differed."""
    for kind, content in described.items():
        if kind == "plain":
            return content
        if kind == "lookahead":
            return get(content)
        if kind == "tuple":
            return tuple(changed(one, part, get) for one, part in zip(base, content, strict=True))
        made = copy.copy(base)
        for name, part in content.items():
            object.__setattr__(made, name, changed(getattr(base, name), part, get))
        return made
    return base
