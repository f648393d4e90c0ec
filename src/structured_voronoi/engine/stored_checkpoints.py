"""Runs that are kept in checkpoint folders, finished or not, read to be judged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from structured_voronoi.core.contracts import is_independent
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.diagnostics.records import Record, find_scale, name_sampler
from structured_voronoi.engine.plan import Plan
from structured_voronoi.engine.text_chains import Batch, record_of_texts
from structured_voronoi.engine.worker_chains import split_chains
from structured_voronoi.engine.worker_checkpoint import SPLIT
from structured_voronoi.samplers.registry import SAMPLERS, text_sampler
from structured_voronoi.storage.packing import unpack
from structured_voronoi.storage.store import Manifest, read_manifest


def read_checkpoint(folder: Path) -> dict[str, Record]:
    """What a folder holds so far, by prompt where there are several; what is read is compared with its checksum."""
    manifest = read_manifest(folder)
    if manifest.kind == "sv.sample":
        return {"": _read_draws(folder, manifest)}
    if manifest.kind == "texts":
        return _read_texts(folder, manifest)
    raise SamplingError(
        f"{folder} holds a run of {manifest.kind}, which has no chains",
        remedy="it says by itself how it went",
    )


def _parts(folder: Path, manifest: Manifest, kind: str) -> list[Any]:
    """What was put under this name and a number, in order."""
    names = [name for name in sorted(manifest.parts) if re.fullmatch(rf"{kind}-\d+\.safetensors", name)]
    return [unpack(manifest.read(folder, name)) for name in names]


def _read_draws(folder: Path, manifest: Manifest) -> Record:
    settings = manifest.settings
    sampler = settings["sampler"]
    independent = any(entry.class_name == sampler["class"] and is_independent(entry.load()) for entry in SAMPLERS)
    warm = settings["warmup"] if settings["keep_warmup"] and not independent else 0
    spread = split_chains(settings["chains"], unpack(manifest.read(folder, SPLIT))) if SPLIT in manifest.parts else [""]
    groups = [_parts(folder, manifest, f"{group}draws") for group in spread]
    columns = {}
    if all(groups):
        joined = [{name: torch.cat([part[name] for part in parts])[warm:] for name in parts[0]} for parts in groups]
        common = min(len(group["energy"]) for group in joined)
        columns = {
            name: torch.cat([group[name][:common] for group in joined], dim=1).transpose(0, 1).numpy()
            for name in joined[0]
        }
    if not columns or not columns["energy"].size:
        raise SamplingError(f"{folder} holds no draw yet", remedy="wait until there are some")
    draws = columns["energy"].shape[1]
    return Record(
        sampler=name_sampler(sampler["class"], [part["class"] for part in sampler.get("samplers", ())]),
        energy=columns.pop("energy").astype(float),
        tokens=columns.pop("tokens"),
        counts=columns,
        steps=draws * settings["thin"],
        independent=independent,
        scale=find_scale(sampler),
        asked=None if manifest.finished else settings["draws"],
    )


def _read_texts(folder: Path, manifest: Manifest) -> dict[str, Record]:
    accepted = [text for part in _parts(folder, manifest, "texts") for text in part["texts"]]
    if accepted:
        energy = np.array([[text["energy"]] for text in accepted])
        return {"": Record("the engine", energy, independent=True, one_text=True)}
    settings, batches = manifest.settings, list(map(Batch.restored, _parts(folder, manifest, "batch")))
    plans = _parts(folder, manifest, "plan")
    if not batches or not plans:
        raise SamplingError(f"{folder} holds no text yet", remedy="wait until there are some")
    found = {}
    for number, stored in enumerate(plans):
        plan = Plan(**stored, sampler=text_sampler(stored["name"], settings["scale"]))
        own = [batch for batch in batches if len(plans) == 1 or batch.texts[0].chain // settings["n"] == number]
        if own:
            found[f"prompt {number + 1}" if len(plans) > 1 else ""] = record_of_texts(own, plan)
    return found
