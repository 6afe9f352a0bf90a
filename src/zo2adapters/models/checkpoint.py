"""Open a Hugging Face checkpoint for training: config and headers are read and checked, weights are not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import PretrainedConfig, PreTrainedModel

from zo2adapters.models.architecture import ARCHITECTURES, Architecture, ParameterFormats, read_architecture
from zo2adapters.models.derivation import derive_architecture
from zo2adapters.models.gguf_model import GGUFModel
from zo2adapters.models.heads import CAUSAL_LM, Head, head_of, reads_images
from zo2adapters.models.hf import HFBlockModel, HFHeadModel
from zo2adapters.models.losses import without_router_losses
from zo2adapters.models.matching import OverlaidReader, match_tensors, require_dtype
from zo2adapters.models.model_directory import SUFFIXES, ModelDirectory, first_line
from zo2adapters.models.peft_adapter import Adapter, ChosenConfig, by_wrapped_names, inject, peft_config
from zo2adapters.models.peft_kinds import WITH_ADAPTER
from zo2adapters.models.precision import Precision, choose_precision, exact_where_encoded
from zo2adapters.models.quantized import encodings_of
from zo2adapters.models.skeleton import Bounds, OversizedError, build_skeleton
from zo2core import ZO2Error
from zo2core.checkpoint.gguf import is_gguf
from zo2core.checkpoint.shards import INDEX_FILE, SINGLE_FILE, check_float
from zo2core.errors import CheckpointError, OptionError, UnsupportedModelError
from zo2core.protocols import TensorReader
from zo2core.ranges import require_whole

_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES: Mapping[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}

_LOGIT_BYTES = 24 << 20  # bytes of a chunk's float32 logits, which fit in a last-level cache
_MIN_CHUNK = 16  # labelled tokens; the head's weights are read once a chunk


def open_checkpoint(
    path: Path | str,
    *,
    dtype: torch.dtype | str = "auto",
    precision: Precision | str = "exact",
    transfer_dtype: str = "stored",
    export_dtype: torch.dtype | str = "auto",
    architecture: Architecture | Path | None = None,
    loss_chunk: int | Literal["auto"] | None = "auto",
    head: str = CAUSAL_LM.name,
    adapter: Adapter | None = None,
) -> HFBlockModel:
    """Open a model directory, or a model of the hub, for training.

    Args:
        path: Directory in the Hugging Face layout with safetensors weights, or a hub id, which is downloaded into the hub's
            cache and used from there; or a GGUF file, of a split model the first one, whose blocks are decoded when they are
            used.
        dtype: The weights' dtype in memory. "auto" takes the config's and refuses shards in another dtype; a dtype or its
            name converts them. In mixed precision, the dtype of computation; "auto" takes the fastest on this machine.
        precision: ``"exact"`` uses one dtype, in which small updates of 16-bit weights are rounded away as in MeZO;
            ``"mixed"`` stores float32 and computes in 16 bits; ``"auto"`` is mixed for 16-bit weights, else exact; a
            ``Precision`` sets all dtypes and excludes ``dtype``.
        transfer_dtype: The dtype in which the layers' matrices travel to a device with its own memory: "stored",
            "bfloat16", "float16" or "float8", with the suffix "-back" to transfer them back in it, too; see ``Precision``.
        export_dtype: The dtype to which exported weights are rounded. "auto" is the checkpoint's dtype in mixed precision,
            else the stored dtype.
        architecture: The module paths of the model's parts, or a JSON file with them; by default they are derived.
        loss_chunk: Number of labelled tokens for which head and loss are computed at a time, to bound the logits' memory.
            The loss then differs from Hugging Face's in the order of float sums. None computes all at once, bit for bit as
            Hugging Face. "auto" is None in exact precision; in mixed precision it fits a chunk into a cache.
        head: The model's head: "causal-lm", "masked-lm", "sequence-classification" (with regression, if the config says
            so), "token-classification" or "question-answering", as in transformers' auto classes. The checkpoint must
            hold its weights. Labels are those of that class.
        adapter: A peft adapter, whose new float32 parameters alone are trained; all other parameters are read-only and
            keep the checkpoint's dtype.

    Returns:
        The model, cut into segments. Only headers and the descriptions of encodings are read.

    Raises:
        UnsupportedModelError: for an unknown architecture, an unknown quantisation or pickled shards.
        CheckpointError: if files are missing or malformed, or tensors do not match the config.
        OptionError: for an unknown dtype or precision, incompatible dtypes, or a ``loss_chunk`` out of range.
    """
    kind = head_of(head)
    _require_loss_chunk(loss_chunk, kind)
    adapter_config = None if adapter is None else peft_config(adapter)
    if adapter_config is not None:
        _require_adapter_options(precision, transfer_dtype, export_dtype)
        precision = "exact" if precision == "auto" else precision
    directory = resolve_directory(path)
    files = GGUFModel(directory) if is_gguf(directory) else ModelDirectory(directory)
    exported = files.dtype  # building the model sets the config's dtype
    if files.is_encoded:
        precision = exact_where_encoded(precision, transfer_dtype)
    chosen = choose_precision(precision, _dtype(dtype, files), is_given=dtype != "auto", transfer_dtype=transfer_dtype)
    if adapter_config is not None:
        _require_adapter_fits(adapter_config, files.config, kind)
    skeleton = _build(files, chosen.stored, kind)
    entries, encoded = files.tensors(skeleton)
    architecture = _architecture(architecture, skeleton, kind)
    matched = match_tensors(directory, entries, skeleton, architecture)
    if dtype == "auto" and precision in ("auto", "exact") and chosen.autocast is None and not files.converts:
        require_dtype(matched.parameters, skeleton, chosen.stored)
    saved_form = matched.saved_form(skeleton)
    pieces, encodings = encodings_of(matched.parameters, encoded)
    model_class, options = HFBlockModel if kind is CAUSAL_LM else HFHeadModel, dict[str, Any]()
    if kind is CAUSAL_LM:
        automatic = None if without_router_losses(skeleton) else _loss_chunk(files.config, chosen)
        options["loss_chunk"] = automatic if loss_chunk == "auto" else loss_chunk
    else:
        options["head"] = kind
    formats, opened = ParameterFormats(precision=chosen), None
    if adapter is not None and adapter_config is not None:
        base_dtype = chosen.stored if isinstance(precision, Precision) else dtype
        base = partial(open_checkpoint, directory, dtype=base_dtype, architecture=architecture, head=head)
        options["adapter"] = opened = inject(skeleton, adapter, adapter_config, base)
        model_class = opened.kind.model_class or WITH_ADAPTER[model_class]
        pieces, encodings = by_wrapped_names(skeleton, pieces), by_wrapped_names(skeleton, encodings)
        architecture = replace(architecture, embedding=(*architecture.embedding, *opened.inserted.embedding))
        formats = replace(formats, trained=opened.trained, resident=opened.tensors.keys())
        if chosen.autocast is not None:
            opened.require_mixed()
            kept = {name: check_float(first.entry) for name, (first, *_) in pieces.items()}
            formats = replace(formats, frozen_dtypes=kept)  # frozen weights keep the checkpoint's dtype
    if export_dtype != "auto":
        exported = _dtype(export_dtype, files)
    elif chosen.autocast is None:
        exported = chosen.stored
    reader: TensorReader = files.reader(pieces)
    if opened is not None:
        reader = OverlaidReader(reader, opened.values, opened.dtypes, opened.where)
    rounds = chosen.autocast is not None or export_dtype != "auto"  # otherwise some may have another dtype
    return model_class(
        skeleton,
        architecture,
        reader,
        files.companions(skeleton, exported),
        formats=replace(formats, encodings=encodings),
        saved_form=saved_form,
        export_dtype=exported if rounds else None,
        **options,
    )


def _require_loss_chunk(loss_chunk: object, kind: Head) -> None:
    """Refuse a chunk out of range, or for a head that computes the loss at once."""
    if loss_chunk in (None, "auto"):
        return
    require_whole("loss_chunk", loss_chunk, 1, otherwise=", None or 'auto'")
    if kind is not CAUSAL_LM:
        raise OptionError("loss_chunk", found=f"{loss_chunk} for {kind.name}", expected="none", remedy="leave it out")


def _require_adapter_options(precision: Precision | str, transfer_dtype: str, export_dtype: torch.dtype | str) -> None:
    """Refuse dtypes that cannot be chosen with an adapter."""
    if isinstance(precision, Precision) and precision.transfer_dtype not in (None, precision.stored):
        transfer_dtype = str(precision.transfer_dtype)
    if transfer_dtype != "stored":
        expected = "the stored transfer dtype with an adapter"
        raise OptionError("transfer_dtype", found=transfer_dtype, expected=expected, remedy="leave it out")
    if export_dtype != "auto":
        expected = "auto with an adapter, which is exported in float32"
        raise OptionError("export_dtype", found=str(export_dtype), expected=expected, remedy="leave it out")


def _require_adapter_fits(adapter: ChosenConfig, config: PretrainedConfig, head: Head) -> None:
    """Refuse a kind of adapter that cannot be trained in this kind of model."""
    if adapter.kind.model_class is not None and (head is not CAUSAL_LM or reads_images(config)):
        model = "a model that reads images" if head is CAUSAL_LM else "a model that has this head"
        raise UnsupportedModelError(
            f"model type {config.model_type}, head {head.name}",
            found=f"{adapter.kind.title} on {model}",
            expected="a causal language model of text alone",
            remedy="use LoRA, or train all parameters",
        )


def _architecture(declared: Architecture | Path | None, skeleton: PreTrainedModel, kind: Head) -> Architecture:
    """The caller's declaration of a model, else the known or the derived one."""
    model_type = skeleton.config.model_type
    if declared is None:
        known = ARCHITECTURES.get(model_type) if kind is CAUSAL_LM else None
        return known or derive_architecture(skeleton, head=kind)
    architecture = read_architecture(declared) if isinstance(declared, Path) else declared
    if architecture.model_type != model_type:
        raise OptionError(
            "architecture",
            found=f"a declaration of {architecture.model_type}",
            expected=f"a declaration of {model_type}, as config.json says",
            remedy="pass the declaration of this model, or leave it out",
        )
    return architecture


def resolve_directory(path: Path | str) -> Path:
    """Find a model directory or a GGUF file; download a model of the hub into the hub's cache."""
    directory = Path(path)
    if directory.is_dir() or is_gguf(directory):
        if (directory / "adapter_config.json").exists() and not (directory / "config.json").exists():
            raise CheckpointError(
                directory,
                found="an adapter",
                expected="the directory of a whole model",
                remedy=f"pass --adapter {directory}, or --run with the directory of the run that trained it",
            )
        return directory
    text = str(path)
    if isinstance(path, str) and not text.startswith((".", "/", "~")) and text.count("/") <= 1 and not directory.exists():
        try:
            described = Path(snapshot_download(text, allow_patterns=[f"*{suffix}" for suffix in sorted(SUFFIXES)]))
            return Path(snapshot_download(text, allow_patterns=_shards(described)))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise CheckpointError(
                text,
                found=f"neither a directory nor a model of the hub ({str(error).splitlines()[0]})",
                expected="a model directory or a hub id",
                remedy="check the spelling and the network",
            ) from error
    raise CheckpointError(
        text, found="no directory", expected="a model directory in the Hugging Face layout", remedy="check the path"
    )


def _shards(directory: Path) -> list[str]:
    """The files of weights that a model needs: the index's shards, or the only one; reading reports a damaged index."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return sorted(set(json.loads((directory / INDEX_FILE).read_bytes())["weight_map"].values()))
    return [SINGLE_FILE]


def _build(files: ModelDirectory | GGUFModel, dtype: torch.dtype, head: Head) -> PreTrainedModel:
    try:
        return build_skeleton(files.config, dtype, head, bounds=Bounds.of(files.shapes))
    except ZO2Error:
        raise
    except OversizedError as error:
        raise CheckpointError(
            files.described_in,
            found=f"the config of a model with {error}",
            expected="the sizes of the weights",
            remedy="use the config that belongs to these weights",
        ) from error
    except Exception as error:  # any: sizes that contradict each other surface inside the model's own code
        raise UnsupportedModelError(
            files.described_in,
            found=f"a config that transformers cannot build a model from ({type(error).__name__}: {first_line(error)})",
            expected=f"the config of a model with a head for {head.name}",
            remedy="use the config that belongs to these weights, or another head",
        ) from error


def _dtype(dtype: torch.dtype | str, files: ModelDirectory | GGUFModel) -> torch.dtype:
    if dtype == "auto":
        return files.dtype
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise OptionError(
            "dtype", found=repr(dtype), expected=f"'auto' or one of {', '.join(DTYPES)}", remedy="pass one of these"
        )
    return chosen


def _loss_chunk(config: PretrainedConfig, precision: Precision) -> int | None:
    if precision.autocast is None:
        return None
    return max(_LOGIT_BYTES // (4 * int(config.get_text_config().vocab_size)), _MIN_CHUNK)
