"""Open a Hugging Face checkpoint for training: config and headers are read and checked, weights are not."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from zo2adapters.models.architecture import Architecture, ParameterFormats, read_architecture
from zo2adapters.models.architectures import ARCHITECTURES
from zo2adapters.models.companions import (
    SUFFIXES,
    companion_files,
    portable_companions,
    refuse_hub_kernels,
    remote_code_note,
    without_remote_code,
)
from zo2adapters.models.configs import refuse_oversized
from zo2adapters.models.derivation import derive_architecture
from zo2adapters.models.gguf.model import GGUFModel
from zo2adapters.models.head_model import HFHeadModel
from zo2adapters.models.heads import CAUSAL_LM, Head, head_of, reads_images
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.matching import Matched, load_buffers, match_tensors, require_dtype
from zo2adapters.models.peft_kinds.kind import OpenedAdapter
from zo2adapters.models.peft_kinds.reader import AdapterReader
from zo2adapters.models.peft_model import Adapter, ChosenConfig, by_wrapped_names, inject, peft_config
from zo2adapters.models.precision import Precision, choose_precision, exact_where_encoded
from zo2adapters.models.quantized import EncodedTensor, Quantization, encodings_of, without_encodings
from zo2adapters.models.router_losses import without_router_losses
from zo2adapters.models.skeleton import Bounds, OversizedError, build_skeleton
from zo2adapters.models.vision import HFVisionModel
from zo2core import ZO2Error
from zo2core.checkpoint import Piece, SafetensorsReader, TensorEntry, find_tensors, is_gguf
from zo2core.checkpoint.reader import INDEX_FILE, SINGLE_FILE
from zo2core.encodings import Encoding
from zo2core.errors import CheckpointError, OptionError, UnsupportedModelError, ZO2Warning
from zo2core.protocols import TensorReader
from zo2core.ranges import require_whole
from zo2core.types import SavedForm

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

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
    if adapter is not None:
        _require_adapter_options(precision, transfer_dtype, export_dtype)
        precision = "exact" if precision == "auto" else precision
    directory = resolve_directory(path)
    files: ModelFiles = GGUFModel(directory) if is_gguf(directory) else _DirectoryFiles(directory)
    checkpoint_dtype = files.dtype  # building the model sets the config's dtype
    if files.is_encoded:
        precision = exact_where_encoded(precision, transfer_dtype)
    chosen = choose_precision(precision, _dtype(dtype, files), is_given=dtype != "auto", transfer_dtype=transfer_dtype)
    model_class = _model_class(files.config, kind)
    if adapter_config is not None:
        where = f"model type {files.config.model_type}, head {head}"
        _require_adapter_fits(adapter_config, model_class, where=where)
    skeleton = _build(files, chosen.stored, kind)
    entries, encoded = files.tensors(skeleton)
    architecture = _architecture(architecture, skeleton, kind)
    matched = match_tensors(directory, entries, skeleton, architecture)
    if dtype == "auto" and precision in ("auto", "exact") and chosen.autocast is None and not files.converts:
        require_dtype(matched.parameters, skeleton, chosen.stored)
    saved_form = _saved_form(matched, skeleton)
    pieces, encodings = encodings_of(matched.parameters, encoded)
    opened: OpenedAdapter | None = None
    if adapter is not None and adapter_config is not None:
        base_dtype = chosen.stored if isinstance(precision, Precision) else dtype
        base = partial(open_checkpoint, directory, dtype=base_dtype, architecture=architecture, head=head)
        opened = inject(skeleton, adapter, adapter_config, base)
        if chosen.autocast is not None:
            _require_mixes(opened)
        pieces, encodings = by_wrapped_names(skeleton, pieces), by_wrapped_names(skeleton, encodings)
        architecture = replace(architecture, embedding=(*architecture.embedding, *opened.inserted.embedding))
    exported = checkpoint_dtype if chosen.autocast is not None else chosen.stored
    if export_dtype != "auto":
        exported = _dtype(export_dtype, files)
    rounds = chosen.autocast is not None or export_dtype != "auto"  # otherwise some may have another dtype
    options: dict[str, Any] = {
        "formats": _formats(chosen, encodings, pieces, opened),
        "saved_form": saved_form,
        "export_dtype": exported if rounds else None,
    }
    if kind is CAUSAL_LM:
        automatic = None if without_router_losses(skeleton) else _loss_chunk(files.config, chosen)
        options["loss_chunk"] = automatic if loss_chunk == "auto" else loss_chunk
    make, reader = _factory(model_class, kind, opened), files.reader(pieces)
    reader = reader if opened is None else AdapterReader(reader, opened)
    return make(skeleton, architecture, reader, files.companions(skeleton, exported), **options)


def _model_class(config: PretrainedConfig, kind: Head) -> type[HFBlockModel]:
    """The class of models with this config and this head, without an adapter."""
    if kind is not CAUSAL_LM:
        return HFHeadModel
    return HFVisionModel if reads_images(config) else HFBlockModel


def _factory(model_class: type[HFBlockModel], kind: Head, opened: OpenedAdapter | None) -> Callable[..., HFBlockModel]:
    """The function that makes the model, from the arguments of ``HFBlockModel``."""
    make: Callable[..., HFBlockModel] = model_class if opened is None else opened.kind.model_classes[model_class]
    leading = [*([] if opened is None else [opened]), *([] if kind is CAUSAL_LM else [kind])]
    return partial(make, *leading)


def _saved_form(matched: Matched, skeleton: PreTrainedModel) -> SavedForm:
    """How the checkpoint stores parameters that have other names or parts in the model, and its buffers."""
    stored = matched.stored_differently(skeleton.base_model_prefix)
    parts = {name: tuple(piece.saved_part for piece in pieces) for name, pieces in stored.items()}
    return SavedForm(parts, load_buffers(matched.buffers, skeleton))


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


def _require_mixes(adapter: OpenedAdapter) -> None:
    """Refuse mixed precision where an adapter would not compute what it computes in the whole model."""
    why_not = adapter.kind.why_not_mixed(adapter.config)
    if why_not is not None:
        raise OptionError(
            "precision",
            found=f"mixed with {why_not}",
            expected="exact precision",
            remedy="leave it out, or use LoRA of linear layers",
        )


def _require_adapter_fits(adapter: ChosenConfig, model_class: type[HFBlockModel], *, where: str) -> None:
    """Refuse a kind of adapter that cannot be trained in this kind of model."""
    if model_class not in adapter.kind.model_classes:
        model = "a model that reads images" if model_class is HFVisionModel else "a model that has this head"
        raise UnsupportedModelError(
            where,
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


def _formats(
    precision: Precision,
    encodings: Mapping[str, Encoding],
    pieces: Mapping[str, Sequence[Piece]],
    opened: OpenedAdapter | None,
) -> ParameterFormats:
    """How parameters are stored, transferred and computed; those of an adapter's base are frozen."""
    formats = ParameterFormats(
        autocast=precision.autocast,
        transfer_dtype=None if precision.transfer_dtype is precision.stored else precision.transfer_dtype,
        transfer_back=precision.transfer_back,
        encodings=encodings,
    )
    if opened is None:
        return formats
    frozen_dtypes: dict[str, torch.dtype] = {}
    if precision.autocast is not None:  # frozen weights keep the checkpoint's dtype
        dtypes = ((name, those[0].entry.torch_dtype) for name, those in pieces.items() if name not in opened.shapes)
        frozen_dtypes = {name: dtype for name, dtype in dtypes if dtype is not None}
    return replace(formats, trained=opened.trained, resident=frozenset(opened.shapes), frozen_dtypes=frozen_dtypes)


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


def _read_config(directory: Path) -> tuple[PretrainedConfig, Quantization | None]:
    """Read the config, and split off its quantization."""
    if not (directory / "config.json").exists():
        raise CheckpointError(
            directory,
            found="no config.json",
            expected="a model directory",
            remedy="pass the directory that holds config.json",
        )
    companion_files(directory)  # refuses unsafe files before transformers reads them
    refuse_oversized(directory / "config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # any: a malformed config leads transformers to validation errors, AttributeError, ...
        raise UnsupportedModelError(
            directory / "config.json",
            found=f"a config that transformers cannot load without remote code ({_first_line(error)})",
            expected="a model that transformers supports without remote code",
            remedy="use a checkpoint of such an architecture; remote code is never run",
        ) from error
    refuse_hub_kernels(config, directory / "config.json")
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return config, None
    del config.quantization_config
    return config, Quantization.of(directory / "config.json", quantization)


def _build(files: ModelFiles, dtype: torch.dtype, head: Head) -> PreTrainedModel:
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
            found=f"a config that transformers cannot build a model from ({type(error).__name__}: {_first_line(error)})",
            expected=f"the config of a model with a head for {head.name}",
            remedy="use the config that belongs to these weights, or another head",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _refuse_pickled(directory: Path) -> None:
    pickled = sorted(directory.glob("pytorch_model*.bin"))
    if pickled and not list(directory.glob("*.safetensors")):
        raise UnsupportedModelError(
            pickled[0],
            found="pickled weights",
            expected="safetensors",
            remedy=f"convert it once: zo2 convert --model {directory} --output NEW",
        )


def _dtype(dtype: torch.dtype | str, files: ModelFiles) -> torch.dtype:
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


class ModelFiles(Protocol):
    """A model's config and tensors, before the model is built."""

    config: PretrainedConfig
    described_in: Path  # the file that has the config
    converts: bool  # whether tensors may have another dtype than the model's, to which they are converted

    @property
    def dtype(self) -> torch.dtype:
        """The checkpoint's dtype."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Shapes of all tensors."""

    @property
    def is_encoded(self) -> bool:
        """Whether there are tensors that have to be decoded."""

    def tensors(self, skeleton: PreTrainedModel) -> tuple[dict[str, TensorEntry], dict[str, EncodedTensor]]:
        """All tensors as if none were encoded, and the encoded ones, by name."""

    def reader(self, pieces: Mapping[str, Sequence[Piece]]) -> TensorReader:
        """A reader of the parameters that consist of these pieces."""

    def companions(self, skeleton: PreTrainedModel, dtype: torch.dtype) -> Mapping[str, Path | bytes]:
        """Files to write beside exported weights of this dtype."""


class _DirectoryFiles:
    """A directory in the Hugging Face layout."""

    converts = False

    def __init__(self, directory: Path) -> None:
        self._directory, self.described_in = directory, directory / "config.json"
        self.config, quantization = _read_config(directory)
        _refuse_pickled(directory)
        self._entries, self._encoded = find_tensors(directory), dict[str, EncodedTensor]()
        self.is_encoded = quantization is not None
        if quantization is not None:
            self._entries, self._encoded = without_encodings(self._entries, quantization, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The config's dtype, else that of the first tensor."""
        found = (entry.torch_dtype for entry in self._entries.values() if entry.torch_dtype is not None)
        in_config = getattr(self.config, "dtype", None)
        return in_config if isinstance(in_config, torch.dtype) else next(found, torch.float32)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all tensors."""
        return [entry.shape for entry in self._entries.values()]

    def tensors(self, skeleton: PreTrainedModel) -> tuple[dict[str, TensorEntry], dict[str, EncodedTensor]]:
        """All tensors as if none were encoded, and the encoded ones, by name."""
        return self._entries, self._encoded

    def reader(self, pieces: Mapping[str, Sequence[Piece]]) -> TensorReader:
        """A reader of the parameters that consist of these pieces."""
        return SafetensorsReader(pieces)

    def companions(self, skeleton: PreTrainedModel, dtype: torch.dtype) -> Mapping[str, Path | bytes]:
        """The files beside the weights."""
        return _companions(self._directory, skeleton, dtype)


def _companions(directory: Path, skeleton: PreTrainedModel, dtype: torch.dtype) -> dict[str, Path | bytes]:
    files, changed = portable_companions(directory)
    if changed:
        warnings.warn(remote_code_note(changed), ZO2Warning, stacklevel=3)
    config = without_remote_code(json.loads((directory / "config.json").read_bytes()))
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)  # exported weights are decoded
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["architectures"] = [type(skeleton).__name__]
    files["config.json"] = json.dumps(config, indent=2).encode() + b"\n"
    return files
