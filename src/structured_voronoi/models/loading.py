"""Load and save networks with their tokenizers: bundled or fetched ones, hub names, folders, GGUF files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structured_voronoi.core.errors import SamplingError, did_you_mean, one_line
from structured_voronoi.core.validation import is_file, is_folder, usable_device
from structured_voronoi.models.wheels import WHEELS, fetched_model

BUNDLED = Path(__file__).parent / "bundled"
"""Folder of the bundled language model."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Loaded(NamedTuple):
    """A network in evaluation mode, without gradients, and its tokenizer."""

    network: Any
    tokenizer: Any


def load_model(name: str, device: str = "cpu", dtype: str = "float32") -> Loaded:
    """Load a causal language model.

    Only safetensors and GGUF files are read, and remote code is never run.

    Parameters
    ----------
    name
        ``bundled``, a name listed by ``svs models ls``, a Hugging Face hub name, a folder, or a .gguf file.
    device
        Torch device.
    dtype
        ``float32``, ``float64``, ``bfloat16`` or ``float16``.

    Returns
    -------
    Loaded
        The network and its tokenizer.

    Raises
    ------
    SamplingError
        If the model is unknown, incomplete, damaged or of an unsupported kind.

    Examples
    --------
    >>> network, tokenizer = load_model("bundled")
    >>> tokenizer.decode(tokenizer("The Old Mill")["input_ids"])
    'The Old Mill'
    """
    if dtype not in DTYPES:
        raise SamplingError(f"{dtype!r} is unknown", argument="dtype", remedy=did_you_mean(dtype, DTYPES))
    device = usable_device(device)
    source, options = _locate(name)
    if "gguf_file" in options:
        _disable_gguf_progress_bar()
    subject = f"model {name}"
    try:
        loaded = from_pretrained("AutoModelForCausalLM", source, subject, {"dtype": DTYPES[dtype]}, **options)
        loaded.network.to(device)
        _limit_context(loaded.network)
        _check_head(subject, loaded.network)
    except SamplingError:
        raise
    except Exception as error:  # the libraries raise many kinds of exceptions
        raise _load_error(name, source, error) from error
    return loaded


def save_model(loaded: Loaded, folder: Path) -> None:
    """Save a network and its tokenizer to a folder that `load_model` reads, with the weights as they are in memory."""
    network, tokenizer = loaded
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):  # `save_pretrained` refuses these networks
        if name in vars(network):
            delattr(network, name)
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def from_pretrained(
    auto_class: str,
    source: str,
    subject: str,
    network_options: dict[str, Any] | None = None,
    *,
    complete: bool = True,
    **options: Any,
) -> Loaded:
    """Load a network and its tokenizer with transformers; any exception of the libraries passes through.

    Parameters
    ----------
    auto_class
        Name of the class of transformers that loads the network, for example ``AutoModelForCausalLM``.
    source
        Folder or hub name.
    subject
        What is loaded, for error messages.
    network_options
        Options of the network alone: ``dtype`` and changes to its config.
    complete
        Whether every weight must be in the files.
    **options
        Options of the config, the tokenizer and the network: ``gguf_file``, ``local_files_only``.

    Returns
    -------
    Loaded
        The network, on the CPU, and its tokenizer.
    """
    import transformers

    quiet_libraries()
    options["trust_remote_code"] = False
    check_layer_count(subject, transformers.AutoConfig.from_pretrained(source, **options))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    network, loading_info = getattr(transformers, auto_class).from_pretrained(
        source,
        use_safetensors=None if "gguf_file" in options else True,
        output_loading_info=True,
        **(network_options or {}),
        **options,
    )
    if complete:
        check_complete(subject, loading_info)
    return Loaded(network.eval().requires_grad_(False), tokenizer)


@contextlib.contextmanager
def convert_errors(subject: str, remedy: str) -> Iterator[None]:
    """Replace exceptions of other libraries, which are of many kinds, by a `SamplingError`: it cannot be loaded."""
    try:
        yield
    except SamplingError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {one_line(error)}"
        raise SamplingError(f"{subject} cannot be loaded", cause=cause, remedy=remedy) from error


def hub_options(name: str, known_names: Sequence[str] = ()) -> dict[str, Any]:
    """Options of `from_pretrained` for a hub name: only cached files if the hub does not answer.

    Without them the libraries would retry for half a minute. ``known_names`` are suggested in the error message.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=2.0)
    except HfHubHTTPError:  # the hub answered; loading will raise the same error
        return {}
    except Exception as error:  # no connection, or offline mode
        cached = None if isinstance(error, ValueError) else try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            suggestion = f": {did_you_mean(name, known_names)}" if known_names else ""
            raise SamplingError(
                f"model {name!r} is not a file or a folder and could not be downloaded from the Hugging Face hub",
                cause=f"{type(error).__name__}: {one_line(error, 120)}",
                remedy=f"check the connection and the name{suggestion}",
            ) from error
        return {"local_files_only": True}
    return {}


def quiet_libraries() -> None:
    """Turn off the progress bars and warnings of the libraries; this package reports their errors itself."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def check_complete(subject: str, loading_info: dict[str, Any]) -> None:
    """Raise an error if weights were missing from the files: transformers fills them with random values."""
    missing = [*loading_info.get("missing_keys", ()), *loading_info.get("mismatched_keys", ())]
    if missing:
        first = missing[0] if isinstance(missing[0], str) else missing[0][0]
        raise SamplingError(
            f"{subject} lacks {len(missing)} of its weights, for example {first}",
            remedy="choose a model of the right kind, or copy the files again if they are incomplete",
        )


def check_layer_count(subject: str, config: Any) -> None:
    """Raise an error for an absurd number of layers, which would take minutes to allocate."""
    max_layers = 1000
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if not 1 <= layers <= max_layers:
        raise SamplingError(
            f"{subject}: {layers} layers in its config are not between 1 and {max_layers:,}",
            remedy="the config is damaged: copy it again",
        )


def hidden_states(network: Any, ids: Tensor | None = None, embeds: Tensor | None = None) -> Tensor:
    """The last hidden states, after the final normalisation."""
    states: Tensor = network.base_model(input_ids=ids, inputs_embeds=embeds, use_cache=False).last_hidden_state
    return states


def head(network: Any, hidden: Tensor) -> Tensor:
    """The logits, in float32 or float64: sums of half-precision log-probabilities have errors of several percent."""
    logits: Tensor = network.get_output_embeddings()(hidden)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _locate(name: str) -> tuple[str, dict[str, Any]]:
    """The source of a model and the options with which `from_pretrained` loads it."""
    if name == "bundled":
        return str(BUNDLED), {}
    if name in WHEELS:
        if WHEELS[name].kind != "language model":
            raise SamplingError(
                f"model {name} is an {WHEELS[name].kind}, not a language model", remedy="use smollm2, for example"
            )
        return str(fetched_model(name)), {}
    path = Path(name)
    if path.suffix == ".gguf":
        if not is_file(path):
            raise SamplingError(f"model {name}: no such file", remedy="give the path of a .gguf file")
        return str(path.parent), {"gguf_file": path.name}
    if is_file(path):
        raise SamplingError(
            f"model {name} is a file, but not a .gguf file", remedy="give the folder that contains the model"
        )
    if is_folder(path):
        if not is_file(path / "config.json"):
            raise SamplingError(
                f"model {name}: the folder holds no config.json", remedy="give a folder saved by `save_pretrained`"
            )
        return name, {}
    language_models = [known for known, wheel in WHEELS.items() if wheel.kind == "language model"]
    return name, hub_options(name, ["bundled", *language_models])


def _load_error(name: str, source: str, error: Exception) -> SamplingError:
    """The error for a model that transformers could not load."""
    cause, path = one_line(error, 150), Path(name)
    if name in WHEELS:
        remedy = f"delete {source} and run `svs models get {name}` again"
        return SamplingError(f"model {name} cannot be loaded", cause=cause, remedy=remedy)
    if path.suffix == ".gguf" and isinstance(error, ImportError):
        remedy = "pip install 'structured-voronoi[gguf]'"
        return SamplingError(f"model {name} requires more packages", cause=cause, remedy=remedy)
    if is_folder(path) and not list(path.glob("*.safetensors")) and list(path.glob("*.bin")):
        remedy = "save it again with `save_pretrained`"
        return SamplingError(f"model {name} has its weights in .bin files instead of safetensors", remedy=remedy)
    if "ignore_mismatched_sizes" in cause:
        remedy = "copy both files again"
        return SamplingError(f"model {name}: its weights do not have the shapes of its config.json", remedy=remedy)
    if is_file(path) or is_folder(path):
        remedy = "the file may be damaged or incomplete: copy it again"
        return SamplingError(f"model {name} cannot be loaded", cause=cause, remedy=remedy)
    return SamplingError(
        f"model {name!r} could not be downloaded from the Hugging Face hub",
        cause=f"{type(error).__name__}: {cause}",
        remedy="check the name and the connection, or give a local folder",
    )


def _disable_gguf_progress_bar() -> None:
    """Turn off the progress bar of reading a GGUF file, for which transformers has no setting."""
    from transformers import modeling_gguf_pytorch_utils

    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors


def _limit_context(network: Any) -> None:
    """Set the context of GPT-2 to the size of its position table: configs read from GGUF files always say 1024."""
    table = getattr(network.base_model, "wpe", None)
    if table is not None:
        network.config.max_position_embeddings = min(network.config.max_position_embeddings, len(table.weight))


def _check_head(subject: str, network: Any) -> None:
    """Check that logits are hidden states times the output table, as forward guidance assumes."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=network.device)
    with torch.no_grad():
        table_logits = head(network, hidden_states(network, ids))
        network_logits = network(input_ids=ids).logits
    if not torch.allclose(table_logits.double(), network_logits.double(), atol=1e-3, rtol=1e-3, equal_nan=True):
        raise SamplingError(
            f"{subject} changes its logits after the output table, which is not supported", remedy="use another model"
        )
