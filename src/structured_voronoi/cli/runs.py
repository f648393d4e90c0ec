"""`svs runs`: what a folder holds that was given as --checkpoint, and whether it is whole."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from structured_voronoi.storage.store import MANIFEST, DamagedError, Manifest, read_manifest

Folder = Annotated[Path, Parameter(help="The folder that was given as --checkpoint.")]
SHOWN_TEXTS = 3
LOOKS = 3
"""How often a run that is going on is looked at, until nothing changes meanwhile."""


def check(folder: Folder, /) -> int:
    """Compare every file of a run with its checksum. Exits 0 if all fit, 1 if not, 2 if there is no run.

    Example: svs runs check ./my-run
    """
    with contextlib.suppress(DamagedError):  # which is a finding
        read_manifest(folder)
    damaged = [said for path in sorted(folder.rglob(MANIFEST)) for said in _damage(path.parent)]
    for said in damaged:
        print(said)
    if damaged:
        return 1
    parts = sum(len(read_manifest(path.parent).parts) for path in folder.rglob(MANIFEST))
    print(f"{folder} is whole: {parts} part{'' if parts == 1 else 's'} and the manifest fit their checksums")
    return 0


def show(folder: Folder, /) -> int:
    """Say what a run is, how far it has come, and when; with some of its texts.

    Example: svs runs show ./my-run
    """
    manifest = read_manifest(folder)
    size = sum(part.size for part in manifest.parts.values())
    finished = "finished" if manifest.finished else "unfinished"
    print(f"{folder}: {manifest.kind}, {finished}, {manifest.far or 'nothing yet'}")
    print(f"begun {manifest.begun}, last written {manifest.written}; {len(manifest.parts)} parts, {size:,} bytes")
    for name, value in manifest.settings.items():
        if name != "target":  # what it is known by means nothing to people
            print(f"  {name}: {json.dumps(value, ensure_ascii=False)}")
    print("versions: " + ", ".join(f"{name} {number}" for name, number in manifest.versions.items()))
    for text in _some_texts(folder, manifest):
        print(f"text: {text}")
    return 0


def _damage(folder: Path) -> list[str]:
    """What is wrong with a run, also with one that is going on."""
    for _ in range(LOOKS):
        try:
            manifest = read_manifest(folder)
            damage = manifest.damage(folder)
            if not damage or read_manifest(folder) == manifest:
                return damage
        except DamagedError as error:
            return [str(error)]
    print(f"{folder} changes while it is looked at; look again when its run is over", file=sys.stderr)
    return []


def _some_texts(folder: Path, manifest: Manifest) -> list[str]:
    batches = sorted(name for name in manifest.parts if name.startswith(("batch-", "texts-")))
    if manifest.kind != "texts" or not batches:
        return []
    from structured_voronoi.storage.packing import unpack

    texts = unpack(manifest.read(folder, batches[0]))["texts"]
    return [str(text["text"]) for text in texts[:SHOWN_TEXTS]]
