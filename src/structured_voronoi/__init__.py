"""Exact samples of language models under control, and of any distribution over embedded tokens.

>>> import structured_voronoi as sv
>>> result = sv.generate("bundled", "Near the", [sv.keyword("river")], n=2, max_tokens=30, progress=False)
>>> len(result.texts)
2
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structured_voronoi import baselines as baselines
    from structured_voronoi import verify as verify
    from structured_voronoi.controls.labels import label as label
    from structured_voronoi.controls.texts import any_of as any_of
    from structured_voronoi.controls.texts import characters as characters
    from structured_voronoi.controls.texts import keyword as keyword
    from structured_voronoi.controls.texts import only as only
    from structured_voronoi.controls.texts import regex as regex
    from structured_voronoi.controls.texts import score as score
    from structured_voronoi.controls.texts import words as words
    from structured_voronoi.core.contracts import Control as Control
    from structured_voronoi.core.contracts import Sampler as Sampler
    from structured_voronoi.core.contracts import Target as Target
    from structured_voronoi.core.errors import NoBoundError as NoBoundError
    from structured_voronoi.core.errors import NoStartError as NoStartError
    from structured_voronoi.core.errors import SamplingError as SamplingError
    from structured_voronoi.core.info import Info as Info
    from structured_voronoi.core.streams import Rng as Rng
    from structured_voronoi.diagnostics.checks import DiagnosticSettings as DiagnosticSettings
    from structured_voronoi.diagnostics.checks import DiagnosticWarning as DiagnosticWarning
    from structured_voronoi.diagnostics.diagnosis import Diagnosis as Diagnosis
    from structured_voronoi.engine.checkpoint import CheckpointSettings as CheckpointSettings
    from structured_voronoi.engine.generation import generate as generate
    from structured_voronoi.engine.generation import stream as stream
    from structured_voronoi.engine.probability import probability as probability
    from structured_voronoi.engine.result import Generation as Generation
    from structured_voronoi.engine.sampling import sample as sample
    from structured_voronoi.engine.settings import EngineSettings as EngineSettings
    from structured_voronoi.engine.stored_runs import diagnose as diagnose
    from structured_voronoi.engine.texts import Text as Text
    from structured_voronoi.lookahead.lookahead import Lookahead as Lookahead
    from structured_voronoi.lookahead.settings import LookaheadSettings as LookaheadSettings
    from structured_voronoi.metrics.probability import Probability as Probability
    from structured_voronoi.samplers.ancestral import Ancestral as Ancestral
    from structured_voronoi.samplers.cycle import Cycle as Cycle
    from structured_voronoi.samplers.guided import Guided as Guided
    from structured_voronoi.samplers.gwg import GibbsWithGradients as GibbsWithGradients
    from structured_voronoi.samplers.pncg import PNCG as PNCG
    from structured_voronoi.samplers.refresh import Refresh as Refresh
    from structured_voronoi.samplers.rejection import Rejection as Rejection
    from structured_voronoi.samplers.svs import SVS as SVS
    from structured_voronoi.targets.categorical import CategoricalTarget as CategoricalTarget
    from structured_voronoi.targets.controlled import ControlledTarget as ControlledTarget
    from structured_voronoi.targets.language_model import LanguageModel as LanguageModel
    from structured_voronoi.targets.language_model import load as load
    from structured_voronoi.targets.potts import PottsTarget as PottsTarget
    from structured_voronoi.targets.tabular import TabularTarget as TabularTarget
    from structured_voronoi.targets.text import TextTarget as TextTarget

# imported when first used, so that the command line starts quickly
_HOMES = {
    "Target": "core.contracts",
    "Control": "core.contracts",
    "Sampler": "core.contracts",
    "Info": "core.info",
    "SamplingError": "core.errors",
    "NoStartError": "core.errors",
    "NoBoundError": "core.errors",
    "Rng": "core.streams",
    "load": "targets.language_model",
    "LanguageModel": "targets.language_model",
    "TextTarget": "targets.text",
    "ControlledTarget": "targets.controlled",
    "CategoricalTarget": "targets.categorical",
    "TabularTarget": "targets.tabular",
    "PottsTarget": "targets.potts",
    "keyword": "controls.texts",
    "regex": "controls.texts",
    "words": "controls.texts",
    "characters": "controls.texts",
    "only": "controls.texts",
    "score": "controls.texts",
    "any_of": "controls.texts",
    "label": "controls.labels",
    "generate": "engine.generation",
    "stream": "engine.generation",
    "probability": "engine.probability",
    "sample": "engine.sampling",
    "diagnose": "engine.stored_runs",
    "Generation": "engine.result",
    "Text": "engine.texts",
    "Probability": "metrics.probability",
    "Diagnosis": "diagnostics.diagnosis",
    "DiagnosticWarning": "diagnostics.checks",
    "DiagnosticSettings": "diagnostics.checks",
    "EngineSettings": "engine.settings",
    "CheckpointSettings": "engine.checkpoint",
    "LookaheadSettings": "lookahead.settings",
    "Lookahead": "lookahead.lookahead",
    "SVS": "samplers.svs",
    "PNCG": "samplers.pncg",
    "GibbsWithGradients": "samplers.gwg",
    "Refresh": "samplers.refresh",
    "Cycle": "samplers.cycle",
    "Ancestral": "samplers.ancestral",
    "Rejection": "samplers.rejection",
    "Guided": "samplers.guided",
}
_ROOMS = ("baselines", "verify")
__all__ = sorted([*_HOMES, *_ROOMS])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"structured_voronoi.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'structured_voronoi' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"structured_voronoi.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
