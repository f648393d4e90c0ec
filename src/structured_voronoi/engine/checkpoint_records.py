"""The data of runs in checkpoint folders, complete or not, for `diagnose`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from structured_voronoi.core.contracts import is_independent
from structured_voronoi.core.errors import SamplingError
from structured_voronoi.diagnostics.records import LOG_PROB, Record, find_scale, name_sampler
from structured_voronoi.engine.plan import Plan
from structured_voronoi.engine.text_chains import Batch, record_of_texts
from structured_voronoi.engine.worker_chains import split_chains
from structured_voronoi.engine.worker_checkpoint import SPLIT
from structured_voronoi.samplers.registry import SAMPLERS, text_sampler
from structured_voronoi.storage.manifest import Manifest, read_manifest
from structured_voronoi.storage.packing import unpack


def read_checkpoint(folder: Path) -> dict[str, Record]:
    """The runs in a folder, by prompt if there are several. Checksums of all files that are read are verified."""
    manifest = read_manifest(folder)
    if manifest.kind == "sv.sample":
        return {"": _read_draws(folder, manifest)}
    if manifest.kind == "texts":
        return _read_texts(folder, manifest)
    raise SamplingError(f"{folder} is the checkpoint of {manifest.kind}, which has no diagnostics")


def _read_parts(folder: Path, manifest: Manifest, kind: str) -> list[Any]:
    """The values of a kind, in order."""
    names = [name for name in sorted(manifest.parts) if re.fullmatch(rf"{kind}-\d+\.safetensors", name)]
    return [unpack(manifest.read(folder, name)) for name in names]


def _read_draws(folder: Path, manifest: Manifest) -> Record:
    settings = manifest.settings
    sampler = settings["sampler"]
    independent = any(entry.class_name == sampler["class"] and is_independent(entry.load()) for entry in SAMPLERS)
    warmup_rows = settings["warmup"] if settings["keep_warmup"] and not independent else 0
    folders = [""]
    if SPLIT in manifest.parts:
        folders = list(split_chains(settings["chains"], unpack(manifest.read(folder, SPLIT))))
    groups = [_read_parts(folder, manifest, f"{group}draws") for group in folders]
    columns = {}
    if all(groups):
        joined = [
            {name: torch.cat([part[name] for part in parts])[warmup_rows:] for name in parts[0]} for parts in groups
        ]
        common = min(len(group["tokens"]) for group in joined)
        columns = {
            name: torch.cat([group[name][:common] for group in joined], dim=1).transpose(0, 1).numpy()
            for name in joined[0]
        }
    if not columns or not columns["tokens"].size:
        raise SamplingError(f"{folder} holds no draws yet", remedy="wait until there are some")
    log_prob = columns.pop(LOG_PROB).astype(float)
    return Record(
        sampler=name_sampler(sampler["class"], [part["class"] for part in sampler.get("samplers", ())]),
        log_prob=log_prob,
        tokens=columns.pop("tokens"),
        counts=columns,
        steps=log_prob.shape[1] * settings["thin"],
        independent=independent,
        scale=find_scale(sampler),
        requested_draws=None if manifest.finished else settings["draws"],
    )


def _read_texts(folder: Path, manifest: Manifest) -> dict[str, Record]:
    accepted = [text for part in _read_parts(folder, manifest, "texts") for text in part["texts"]]
    if accepted:
        log_prob = np.array([[text["log_target"]] for text in accepted])
        return {"": Record("rejection with learnt proposals", log_prob, independent=True, one_text=True)}
    settings = manifest.settings
    batches = [Batch.from_data(part) for part in _read_parts(folder, manifest, "batch")]
    plans = _read_parts(folder, manifest, "plan")
    if not batches or not plans:
        raise SamplingError(f"{folder} holds no texts yet", remedy="wait until there are some")
    found = {}
    for number, stored in enumerate(plans):
        plan = Plan(**stored, sampler=text_sampler(stored["name"], settings["scale"]))
        own = [batch for batch in batches if len(plans) == 1 or batch.texts[0].prompt_number == number]
        if own:
            found[f"prompt {number + 1}" if len(plans) > 1 else ""] = record_of_texts(own, plan)
    return found
