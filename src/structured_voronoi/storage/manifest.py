"""Manifests of checkpoint folders: what run a folder holds, and the checksums of its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from structured_voronoi.core.errors import SamplingError
from structured_voronoi.core.validation import is_folder

MANIFEST = "manifest.json"


class DamagedError(SamplingError):
    """A file of a checkpoint is not what was written."""

    def __init__(self, message: str, *, remedy: str = "use a new checkpoint folder", **fields: Any) -> None:
        super().__init__(message, remedy=remedy, **fields)


@dataclass(frozen=True)
class Part:
    """What the manifest says about a file."""

    sha256: str
    size: int

    @classmethod
    def of(cls, data: bytes) -> Part:
        return cls(hashlib.sha256(data).hexdigest(), len(data))

    def find_damage(self, path: Path) -> str:
        """What is wrong with the file; empty if it is what was written."""
        try:
            if not path.exists():
                return f"{path} is missing"
            if not path.is_file() or path.stat().st_size != self.size:
                return f"{path} is damaged: its size is not {self.size} bytes"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                    return f"{path} is damaged: its checksum does not match"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        return ""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint folder holds."""

    FORMAT: ClassVar[int] = 1

    kind: str
    """The command or function that the run belongs to."""
    settings: dict[str, Any]
    """Everything the result depends on. A run is resumed with the same settings only."""
    versions: dict[str, str]
    begun: str
    """Time in ISO format."""
    saved: str
    """Time of the last save."""
    progress: dict[str, Any] = field(default_factory=dict)
    """{"done": 3, "of": 8, "unit": "texts"}"""
    finished: bool = False
    parts: dict[str, Part] = field(default_factory=dict)
    """The files of the run, by their paths within the folder."""

    def encode(self) -> bytes:
        """JSON, with a checksum of the rest at its end."""
        body = {"format": self.FORMAT, **asdict(self)}
        return _to_json({**body, "checksum": hashlib.sha256(_to_json(body)).hexdigest()})

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        """Read a manifest; an error unless its bytes are exactly those that were written."""
        try:
            body = json.loads(data)
            version = body.pop("format")
            if version != cls.FORMAT:
                raise SamplingError(
                    f"{path} has format {version}, and this version reads format {cls.FORMAT}",
                    remedy="use the version that wrote it",
                )
            body.pop("checksum")
            body["parts"] = {name: Part(**part) for name, part in body["parts"].items()}
            manifest = cls(**body)
            is_damaged = manifest.encode() != data
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_damaged = True
        if is_damaged:
            raise DamagedError(f"{path} is damaged: its checksum does not match")
        check_part_names(manifest.parts, path)
        return manifest

    @property
    def progress_text(self) -> str:
        """The progress in words, for example "3 of 8 texts"; empty if none was recorded."""
        done, total, unit = (self.progress.get(name, "") for name in ("done", "of", "unit"))
        return f"{done:,}{f' of {total:,}' if total else ''} {unit}" if self.progress else ""

    def read(self, folder: Path, name: str) -> bytes:
        """The bytes of a file, compared with its checksum."""
        damage = self.parts[name].find_damage(folder / name)
        if damage:
            raise DamagedError(damage, remedy="restore it, or use a new checkpoint folder")
        return (folder / name).read_bytes()

    def find_damage(self, folder: Path) -> list[str]:
        """What is wrong with the files, one message each."""
        return [damage for name, part in self.parts.items() if (damage := part.find_damage(folder / name))]


def check_part_names(names: Mapping[str, Any], path: Path) -> None:
    """Refuse names that lead out of the folder; damaged manifests and workers may contain any."""
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", name, re.ASCII):
            raise SamplingError(
                f"{name!r} is not a valid file name in {path}",
                remedy="use a new checkpoint folder",
            )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, which another process may be writing to."""
    path = folder / MANIFEST
    if not is_folder(folder):
        raise SamplingError(f"{folder} is not a folder", remedy="give the folder of a checkpoint")
    if not path.is_file():
        raise SamplingError(f"{folder} has no {MANIFEST}", remedy="give the folder of a checkpoint")
    try:
        return Manifest.decode(path.read_bytes(), path)
    except OSError as error:
        raise SamplingError(f"{path} cannot be read", cause=error.strerror, remedy="make it readable") from error


def _to_json(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()
