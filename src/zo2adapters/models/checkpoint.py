"""Open a Hugging Face checkpoint for training: config and headers are read and checked, weights are
not.

A model directory is untrusted. A link in it could copy any file of this machine into an export, a
FIFO would block for ever, and a file of absurd size would be read whole. The links of the hub's
cache are accepted. Sizes in a config are checked before transformers reads it, under their standard
names and under the config class's aliases (``n_layer`` of GPT-2), also in nested configs
(``text_config``). Other sizes are bounded while the model is built: see ``Bounds`` in ``skeleton``.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from zo2adapters.models import stored_tensors
from zo2adapters.models.adapter_files import CONFIG_FILE
from zo2adapters.models.architecture import (
    Architecture,
    ParameterFormats,
    Precision,
    architecture_of,
    choose_precision,
)
from zo2adapters.models.batches import CAUSAL_LM, Head, head_of, reads_images, without_router_losses
from zo2adapters.models.gguf_model import GGUFModel
from zo2adapters.models.hf import HFBlockModel, HFHeadModel
from zo2adapters.models.model_files import (
    is_gguf,
    may_be_of_hub,
    no_model,
    refuse_adapter,
    refuse_pickles,
    require_config,
)
from zo2adapters.models.module_use import module_use
from zo2adapters.models.ollama import is_ollama_name, read_ollama_model
from zo2adapters.models.peft_adapter import (
    Adapter,
    ChosenConfig,
    OpenBase,
    OpenedAdapter,
    by_wrapped_names,
    inject,
    peft_config,
)
from zo2adapters.models.peft_model import PeftBlockModel, PeftHeadModel, PrefixBlockModel
from zo2adapters.models.quantization import EncodedTensor, Quantization
from zo2adapters.models.skeleton import Bounds, OversizedError, build_skeleton, leave_out
from zo2core import ZO2Error
from zo2core.checkpoint.shards import (
    INDEX_FILE,
    SINGLE_FILE,
    BaseFiles,
    Piece,
    SafetensorsReader,
    TensorEntry,
    check_float,
    choose_weights,
    find_tensors,
    parse_index,
    require_own_file,
    states_of,
)
from zo2core.errors import (
    CheckpointError,
    OptionError,
    UnsupportedModelError,
    ZO2Warning,
    system_errors_as,
    system_remedy,
    without_effect,
)
from zo2core.io.durable import FileState, open_regular
from zo2core.protocols import TensorReader
from zo2core.ranges import require_whole

GENERATION = "generation_config.json"
# of the run that made a model or an adapter; another run's export has its own
PROMPT = "zo2_prompt.json"
_MODELOPT_FILE = "hf_quant_config.json"
# in which quantisers describe encoded weights, beside config.json
_QUANTIZATION_FILES = (_MODELOPT_FILE, "quantize_config.json", "quant_config.json")
SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})  # of the files beside the weights
_OTHER_WEIGHTS = frozenset({".safetensors", ".gguf"})

_MAX_BYTES = 1 << 28  # the largest tokenizers take a tenth of it
_MAX_CONFIG_BYTES = 1 << 24  # configs are parsed here
_LIMITS = {
    "num_hidden_layers": 1 << 10,
    "depth": 1 << 10,  # of vision towers
    "hidden_size": 1 << 20,
    "head_dim": 1 << 20,
    "num_labels": 1 << 20,
}
# what a mixture's routers choose for a token, and of how many, by transformers' names
_CHOSEN = {
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"): (
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ),
    ("topk_group",): ("n_group", "num_expert_group"),
}
_REMEDY = "get the model's files again"
_OF_CONFIG = "use the config.json that belongs to these weights"
_REMOTE_CODE = "auto_map"  # the key under which a config names code to download and run

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
        path: Directory in the Hugging Face layout with safetensors weights, or a hub id, which is
            downloaded into the hub's cache and used from there; or a GGUF file, of a split model
            the first one, whose blocks are decoded when they are used.
        dtype: The weights' dtype in memory. "auto" takes the config's and refuses shards in another
            dtype; a dtype or its name converts them. In mixed precision, the dtype of computation;
            "auto" takes the fastest on this machine.
        precision: ``"exact"`` uses one dtype, in which small updates of 16-bit weights are rounded
            away as in MeZO; ``"mixed"`` stores float32 and computes in 16 bits; ``"auto"`` is mixed
            for 16-bit weights, else exact; a ``Precision`` sets all dtypes and excludes ``dtype``.
        transfer_dtype: The dtype in which the layers' matrices travel to a device with its own
            memory: "stored", "bfloat16", "float16" or "float8", with the suffix "-back" to transfer
            them back in it, too; see ``Precision``.
        export_dtype: The dtype to which exported weights are rounded. "auto" is the checkpoint's
            dtype in mixed precision, else the stored dtype.
        architecture: The module paths of the model's parts, or a JSON file with them; by default
            they are derived.
        loss_chunk: Number of labelled tokens for which head and loss are computed at a time, to
            bound the logits' memory. The loss then differs from Hugging Face's in the order of
            float sums. None computes all at once, bit for bit as Hugging Face. "auto" is None in
            exact precision; in mixed precision it fits a chunk into a cache.
        head: The model's head: "causal-lm", "masked-lm", "sequence-classification" (with
            regression, if the config says so), "token-classification" or "question-answering", as
            in transformers' auto classes. The checkpoint must hold its weights. Labels are those of
            that class.
        adapter: A peft adapter, whose new float32 parameters alone are trained; all other
            parameters are read-only and keep the checkpoint's dtype.

    Returns:
        The model, cut into segments. Only headers and the descriptions of encodings are read.

    Raises:
        UnsupportedModelError: for an unknown architecture, an unknown quantisation or pickled
            shards.
        CheckpointError: if files are missing or malformed, or tensors do not match the config.
        OptionError: for an unknown dtype or precision, incompatible dtypes, or a ``loss_chunk`` out
            of range.
    """
    kind = head_of(head)
    _require_loss_chunk(loss_chunk, kind)
    adapter_config = None if adapter is None else peft_config(adapter)
    if adapter_config is not None:
        precision = _adapter_precision(adapter_config, precision, transfer_dtype, export_dtype)
    directory = resolve_directory(path)
    require_no_adapter(directory, adapter)
    files = GGUFModel(directory) if is_gguf(directory) else ModelDirectory(directory)
    _require_routable(files.described_in, files.config.get_text_config())
    if adapter_config is not None:
        _require_adapter_fits(adapter_config, files.config, kind)
    if files.is_encoded:
        precision = _encoded_precision(precision, transfer_dtype)
    chosen = choose_precision(
        precision, _dtype(dtype, files), is_given=dtype != "auto", transfer_dtype=transfer_dtype
    )
    # before the model is built, which sets the config's dtype
    exported = _export_dtype(export_dtype, files, chosen)
    skeleton = _build(files, chosen.stored, kind)
    entries, encoded = files.tensors(skeleton)
    architecture = architecture_of(skeleton, kind, architecture)
    parameters, saved_form = stored_tensors.match_tensors(
        directory, entries, encoded, skeleton, architecture
    )
    left_out = leave_out(skeleton, architecture.left_out)
    is_exact = precision in ("auto", "exact") and chosen.autocast is None
    if is_exact and dtype == "auto" and not files.converts:
        stored_tensors.require_dtype(parameters, skeleton, chosen.stored)
    pieces, encodings = stored_tensors.encodings_of(parameters, encoded)
    parts = _Parts(
        HFBlockModel if kind is CAUSAL_LM else HFHeadModel,
        architecture,
        ParameterFormats(precision=chosen, encodings=encodings),
        pieces,
    )
    if loss_chunk == "auto":
        loss_chunk = _loss_chunk(skeleton, chosen, kind)
    if adapter_config is not None:
        base_dtype = chosen.stored if isinstance(precision, Precision) else dtype
        base = partial(
            open_checkpoint, directory, dtype=base_dtype, architecture=architecture, head=head
        )
        parts = _with_adapter(parts, skeleton, kind, adapter_config, base, left_out)
    model = parts.make(
        skeleton,
        parts.architecture,
        parts.reader(files),
        files.companions(skeleton, exported or chosen.stored),
        formats=parts.formats,
        saved_form=saved_form,
        export_dtype=exported,
        head=kind,
        loss_chunk=loss_chunk,
    )
    model.base_files = parts.base_files(files)
    return model


class _Parts(NamedTuple):
    """What an adapter changes of the parts of which a model is made."""

    make: Callable[..., HFBlockModel]
    architecture: Architecture
    formats: ParameterFormats
    pieces: Mapping[str, tuple[Piece, ...]]  # of each parameter
    adapter: OpenedAdapter | None = None

    def reader(self, files: ModelDirectory | GGUFModel) -> TensorReader:
        """A reader of all parameters."""
        reader = files.reader(self.pieces)
        if self.adapter is None:
            return reader
        dtypes = {name: tensor.dtype for name, tensor in self.adapter.tensors.items()}
        return stored_tensors.OverlaidReader(
            reader, self.adapter.values, dtypes, self.adapter.where
        )

    def base_files(self, files: ModelDirectory | GGUFModel) -> BaseFiles:
        """The files that are read."""
        beside = {} if self.adapter is None else states_of(self.adapter.beside.values())
        return BaseFiles({**files.states, **beside}, files.small)


def _with_adapter(
    parts: _Parts,
    skeleton: PreTrainedModel,
    head: Head,
    chosen: ChosenConfig,
    base: OpenBase,
    left_out: Collection[str],
) -> _Parts:
    """Insert an adapter into a skeleton, from which tensors of these names were left out; returns
    the parts of a model with it.
    """
    precision = parts.formats.precision
    is_mixed = precision.autocast is not None
    adapter = inject(
        skeleton,
        chosen,
        base,
        is_mixed=is_mixed,
        encoded=parts.formats.encodings.keys(),
        idle=module_use(skeleton, parts.architecture).idle,
        left_out=left_out,
    )
    causal = PeftBlockModel if adapter.wrapper is None else PrefixBlockModel
    model_class = causal if head is CAUSAL_LM else PeftHeadModel
    embedding = (*parts.architecture.embedding, *chosen.kind.embedding)
    pieces = by_wrapped_names(skeleton, parts.pieces)
    encodings = by_wrapped_names(skeleton, parts.formats.encodings)
    frozen_dtypes = {}
    if is_mixed:
        # frozen weights keep the checkpoint's dtype
        frozen_dtypes = {name: check_float(first.entry) for name, (first, *_) in pieces.items()}
    formats = ParameterFormats(
        precision=precision,
        encodings={
            name: encoding for name, encoding in encodings.items() if name not in adapter.beside
        },
        trained=adapter.trained | pieces.keys() if adapter.trains_base else adapter.trained,
        resident=adapter.tensors.keys(),
        frozen_dtypes=frozen_dtypes,
    )
    beside = {name: (Piece.whole(entry),) for name, entry in adapter.beside.items()}
    return _Parts(
        partial(model_class, adapter=adapter),
        replace(parts.architecture, embedding=embedding),
        formats,
        {**pieces, **beside},
        adapter,
    )


def _adapter_precision(
    chosen: ChosenConfig,
    precision: Precision | str,
    transfer_dtype: str,
    export_dtype: torch.dtype | str,
) -> Precision | str:
    """The precision of a base with an adapter. Options that change its dtypes are refused, unless
    it is trained, too.
    """
    carried = precision.carried if isinstance(precision, Precision) else None
    _require_one_of("an adapter", "transfer_dtype", carried or transfer_dtype, "stored")
    if chosen.adapter.trains_base:
        return precision
    _require_one_of("an adapter", "export_dtype", export_dtype, "auto")
    return "exact" if precision == "auto" else precision


def _encoded_precision(precision: Precision | str, transfer_dtype: str) -> str:
    """The precision of quantised weights, which is the only one."""
    _require_one_of("quantised weights", "transfer_dtype", transfer_dtype, "stored")
    _require_one_of("quantised weights", "precision", precision, "exact", "auto")
    return "exact"


def _export_dtype(
    dtype: torch.dtype | str, files: ModelDirectory | GGUFModel, precision: Precision
) -> torch.dtype | None:
    """The dtype to which exported weights are rounded; None: they keep theirs."""
    if precision.autocast is None and dtype == "auto":
        return None
    return _dtype(dtype, files)


def _require_loss_chunk(loss_chunk: object, kind: Head) -> None:
    """Refuse a chunk out of range, or for a head that computes the loss at once."""
    if loss_chunk in (None, "auto"):
        return
    require_whole("loss_chunk", loss_chunk, 1, otherwise=", None or 'auto'")
    if kind is not CAUSAL_LM:
        raise without_effect("loss_chunk", f"{loss_chunk} for {kind.name}", "none")


def _require_one_of(what: str, option: str, value: object, *allowed: object) -> None:
    """Refuse a value that an option cannot have with such a model."""
    if value not in allowed:
        remedy = "leave it out" + (
            ", and pass a dtype to compute in another one" if option == "precision" else ""
        )
        raise OptionError(option, f"{value} with {what}", " or ".join(map(str, allowed)), remedy)


def _require_adapter_fits(adapter: ChosenConfig, config: PretrainedConfig, head: Head) -> None:
    """Refuse a kind of adapter that cannot be trained in this kind of model."""
    if adapter.kind.is_of_text_alone and (head is not CAUSAL_LM or reads_images(config)):
        model = "a model that reads images" if head is CAUSAL_LM else "a model that has this head"
        where = f"model type {config.model_type}, head {head.name}"
        expected = "a causal language model of text alone"
        raise UnsupportedModelError(
            where, f"{adapter.kind.title} on {model}", expected, "use LoRA, or train all parameters"
        )


def resolve_directory(path: Path | str) -> Path:
    """Find a model directory, a GGUF file or a model of ollama's store; download a model of the hub
    into the hub's cache.
    """
    if is_ollama_name(path):
        return read_ollama_model(str(path)).weights
    directory = Path(path)
    if directory.is_dir() or is_gguf(directory):
        refuse_adapter(directory)
        return directory
    if not may_be_of_hub(path):
        raise no_model(path)
    try:
        return _download(str(path))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        found = f"neither a directory nor a model of the hub ({first_line(error)})"
        remedy = system_remedy(error, "check the spelling and the network")
        raise no_model(path, found, remedy) from error


def _download(name: str) -> Path:
    """Download the files of a model that are read: the only file of weights, or else the index's
    shards. Reading reports a damaged index.
    """
    small = [f"*{suffix}" for suffix in sorted(SUFFIXES)]
    directory = Path(snapshot_download(name, allow_patterns=[*small, SINGLE_FILE]))
    if choose_weights(directory) == directory / INDEX_FILE:
        with contextlib.suppress(CheckpointError):
            named = parse_index(directory / INDEX_FILE).values()
            return Path(snapshot_download(name, allow_patterns=sorted(set(named))))
    return directory


def _build(files: ModelDirectory | GGUFModel, dtype: torch.dtype, head: Head) -> PreTrainedModel:
    try:
        return build_skeleton(
            files.config,
            dtype,
            head,
            bounds=Bounds.of([entry.shape for entry in files.entries.values()]),
        )
    except ZO2Error:
        raise
    except OversizedError as error:
        where, remedy = files.described_in, "use the config that belongs to these weights"
        raise CheckpointError(
            where, f"the config of a model with {error}", "the sizes of the weights", remedy
        ) from error
    except Exception as error:
        # any: sizes that contradict each other surface inside the model's own code
        raise UnsupportedModelError(
            files.described_in,
            f"a config that transformers cannot build a model from ({type(error).__name__}: "
            f"{first_line(error)})",
            f"the config of a model with a head for {head.name}",
            "use the config that belongs to these weights, or another head",
        ) from error


def _require_routable(path: Path, config: PretrainedConfig) -> None:
    """Refuse a mixture whose routers choose among fewer experts, or groups of them, than they have
    to choose.
    """
    values = config.to_dict()  # under the names that stand in the file
    for chosen_names, total_names in _CHOSEN.items():
        chosen = next((name for name in chosen_names if type(values.get(name)) is int), None)
        total = next((name for name in total_names if type(values.get(name)) is int), None)
        if chosen is None or total is None or values[total] < 1:
            continue
        most = values[total] + values.get("zero_expert_num", 0)  # LongCat's, without weights
        if not 0 <= values[chosen] <= most:
            expected = f"0 to {most}, since {total} is {values[total]}"
            raise _refused(f"{path}: {chosen}", str(values[chosen])[:40], expected, _OF_CONFIG)


def _dtype(dtype: torch.dtype | str, files: ModelDirectory | GGUFModel) -> torch.dtype:
    if dtype == "auto":
        return files.dtype
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise OptionError(
            "dtype", repr(dtype), f"'auto' or one of {', '.join(DTYPES)}", "pass one of these"
        )
    return chosen


def _loss_chunk(skeleton: PreTrainedModel, precision: Precision, head: Head) -> int | None:
    if head is not CAUSAL_LM or precision.autocast is None or without_router_losses(skeleton):
        return None
    return cached_chunk(skeleton.config)


def cached_chunk(config: PretrainedConfig) -> int:
    """Labelled tokens whose float32 logits fit in a last-level cache."""
    return max(_LOGIT_BYTES // (4 * int(config.get_text_config().vocab_size)), _MIN_CHUNK)


class ModelDirectory:
    """The config and the tensors of a model in the Hugging Face layout, before the model is
    built.
    """

    # whether tensors may have another dtype than the model's, to which they are converted
    converts = False

    def __init__(self, directory: Path) -> None:
        # the latter is the file of the config
        self._directory = directory
        self.described_in = directory / "config.json"
        require_config(directory)
        # before they are read
        states = {
            directory / name: FileState.of(directory / name)
            for name in companion_files(directory)
            if name != CONFIG_FILE  # of an adapter
        }
        self.config, quantization = _read_config(self.described_in)
        _require_weights(directory, self.config)
        self.entries = find_tensors(directory)
        self.states = {**states, **states_of(self.entries.values())}
        self.small = tuple(states)
        self._encoded = dict[str, EncodedTensor]()
        # whether there are tensors that have to be decoded
        self.is_encoded = quantization is not None
        if quantization is not None:
            self.entries, self._encoded = quantization.split(self.entries, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The config's dtype, else that of the first tensor."""
        found = (
            entry.torch_dtype for entry in self.entries.values() if entry.torch_dtype is not None
        )
        in_config = getattr(self.config, "dtype", None)
        return in_config if isinstance(in_config, torch.dtype) else next(found, torch.float32)

    def tensors(
        self, skeleton: PreTrainedModel
    ) -> tuple[dict[str, TensorEntry], dict[str, EncodedTensor]]:
        """All tensors as if none were encoded, and the encoded ones, by name."""
        return self.entries, self._encoded

    def reader(self, pieces: Mapping[str, Sequence[Piece]]) -> TensorReader:
        """A reader of the parameters that consist of these pieces."""
        return SafetensorsReader(pieces)

    def companions(self, skeleton: PreTrainedModel, dtype: torch.dtype) -> dict[str, Path | bytes]:
        """Files to write beside exported weights of this dtype."""
        files, rewritten = portable_companions(self._directory)
        for name in _QUANTIZATION_FILES:  # exported weights are decoded
            files.pop(name, None)
        if rewritten:
            warnings.warn(remote_code_note(rewritten), ZO2Warning, stacklevel=3)
        config = without_remote_code(json_object(self.described_in))
        config.pop("torch_dtype", None)
        config.pop("transformers_weights", None)
        config.pop("quantization_config", None)  # exported weights are decoded
        config["dtype"] = str(dtype).removeprefix("torch.")
        config["architectures"] = [type(skeleton).__name__]
        files["config.json"] = json.dumps(config, indent=2).encode() + b"\n"
        return files


def _require_weights(directory: Path, config: PretrainedConfig) -> None:
    """Refuse a directory whose weights are in other files than transformers' first two choices."""
    chosen = choose_weights(directory)
    named = getattr(config, "transformers_weights", None)
    if chosen is not None and named not in (None, chosen.name):
        where = f"{directory / 'config.json'}: transformers_weights"
        remedy = "remove the entry, if the other file has the weights that you want"
        raise UnsupportedModelError(where, repr(named)[:80], f"{chosen.name}, or none", remedy)
    if chosen is not None:
        return
    refuse_pickles(directory)
    expected = f"{SINGLE_FILE} or {INDEX_FILE}, which transformers loads"
    for other in sorted(path for path in directory.iterdir() if path.suffix in _OTHER_WEIGHTS):
        remedy = "pass the path of this file" if is_gguf(other) else "rename it, if it is the model"
        raise UnsupportedModelError(other, "weights under another name", expected, remedy)


def require_no_adapter(directory: Path, adapter: Adapter | None) -> None:
    """Refuse a model with an adapter in its directory, which transformers would load with it."""
    embedded = directory / CONFIG_FILE
    adapter_path = (
        None if adapter is None or not isinstance(adapter.config, str | Path) else adapter.config
    )
    if embedded.exists() and (
        adapter_path is None or Path(adapter_path).resolve() != directory.resolve()
    ):
        remedy = "pass the directory as --adapter, too, or move the adapter's files away"
        expected = "a model alone: transformers would load the two together"
        raise UnsupportedModelError(embedded, "an adapter beside a model", expected, remedy)


def _read_config(path: Path) -> tuple[PretrainedConfig, Quantization | None]:
    """Read the config, and split off its quantization."""
    refuse_oversized(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
    except Exception as error:
        # any: a malformed config leads transformers to validation errors, AttributeError, ...
        raise UnsupportedModelError(
            path,
            f"a config that transformers cannot load without remote code ({first_line(error)})",
            "a model that transformers supports without remote code",
            "use a checkpoint of such an architecture; remote code is never run",
        ) from error
    _refuse_hub_kernels(config, path)
    for holder in (config, config.get_text_config()):  # as transformers looks for it
        quantization = getattr(holder, "quantization_config", None)
        if quantization:
            del holder.quantization_config
            return config, Quantization.of(path, quantization)
    return config, _modelopt_quantization(path.with_name(_MODELOPT_FILE))


def _modelopt_quantization(path: Path) -> Quantization | None:
    """What ModelOpt's own file says of weights, if there is one; ``config.json`` counts before
    it.
    """
    if not path.exists():
        return None
    quantization = json_object(_checked(path, path.parent)).get("quantization")
    if isinstance(quantization, dict):
        if quantization.get("quant_algo") is None:  # a cache of keys and values alone
            return None
        quantization = {**quantization, "quant_method": "modelopt"}
    return Quantization.of(path, quantization, "quantization")


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def companion_files(directory: Path) -> dict[str, Path]:
    """Find the files of a model directory beside the weights and their index: config, tokenizer,
    generation config.
    """
    files = {}
    for path in sorted(directory.iterdir()):
        if (
            path.suffix in SUFFIXES
            and not path.name.endswith(".index.json")
            and path.name != PROMPT
        ):
            files[path.name] = _checked(path, directory)
    for path in directory.glob("additional_chat_templates/*.jinja"):
        # which tokenizers read; they are not copied
        _checked(path, directory)
    return files


def portable_companions(directory: Path) -> tuple[dict[str, Path | bytes], list[str]]:
    """Find the files to copy beside rewritten weights: those of ``companion_files``, without remote
    code.
    """
    companions: dict[str, Path | bytes] = {}
    rewritten = []
    for name, path in companion_files(directory).items():
        if name == CONFIG_FILE:  # of an adapter, which is not written
            continue
        companions[name] = path
        if name.endswith("config.json") and _REMOTE_CODE.encode() in _read(path):
            config = json_object(path)
            portable = without_remote_code(config)
            if portable != config:
                companions[name] = (
                    json.dumps(portable, indent=2, ensure_ascii=False).encode() + b"\n"
                )
                rewritten.append(name)
    return companions, rewritten


def without_remote_code(value: Any) -> Any:
    """Remove ``auto_map`` from a JSON value, at any depth."""
    if isinstance(value, dict):
        return {
            key: without_remote_code(inner) for key, inner in value.items() if key != _REMOTE_CODE
        }
    return [without_remote_code(inner) for inner in value] if isinstance(value, list) else value


def refuse_oversized(path: Path) -> None:
    """Refuse sizes that would cost transformers excessive time or memory."""
    pending: list[tuple[str, dict[str, Any], Any]] = [("", json_object(path), None)]
    while pending:  # no recursion: an untrusted file may be nested deeply
        # the latter as the enclosing config declares it
        prefix, values, config_class = pending.pop()
        model_type = str(values.get("model_type"))
        if model_type in CONFIG_MAPPING:
            config_class = CONFIG_MAPPING[model_type]
        aliases = (getattr(config_class, "attribute_map", None) or {}).items()
        named = {
            other: _LIMITS[known]
            for pair in aliases
            for known, other in (pair, pair[::-1])
            if known in _LIMITS
        }
        limits = {**_LIMITS, **named}
        sub_configs = getattr(config_class, "sub_configs", None) or {}
        for name, value in values.items():
            if isinstance(value, dict):
                pending.append((f"{prefix}{name}.", value, sub_configs.get(name)))
            elif name in limits and isinstance(value, (int, float)) and value > limits[name]:
                raise _refused(
                    f"{path}: {prefix}{name}", str(value)[:40], f"at most {limits[name]}"
                )


def _refuse_hub_kernels(config: PretrainedConfig, path: Path) -> None:
    """Refuse a config whose attention implementation is code that transformers would download from
    the hub and import.
    """
    named = getattr(config, "_attn_implementation", None)
    if isinstance(named, str) and "/" in named:
        raise UnsupportedModelError(
            path,
            f"{named[:80]!r} as attn_implementation, code from the hub",
            "an implementation within transformers, such as 'sdpa', or none",
            "remove the entry from the file; remote code is never run",
        )
    for name in getattr(config, "sub_configs", ()):
        inner = getattr(config, name, None)
        if inner is not None:
            _refuse_hub_kernels(inner, path)


def end_token_ids(model: HFBlockModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a text: the tokenizer's EOS, and those that the generation config or else
    the config lists.
    """
    content = model.companions.get(GENERATION)
    configured = getattr(model.config.get_text_config(), "eos_token_id", None)
    if content is not None:
        configured = json_object(content).get("eos_token_id")
    ends = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    if not all(type(token) is int or token is None for token in ends):
        expected = "a token id or a list of them as eos_token_id"
        raise _refused(
            content if isinstance(content, Path) else Path(GENERATION),
            str(configured)[:80],
            expected,
        )
    return sorted({token for token in ends if token is not None})


def remote_code_note(names: list[str]) -> str:
    """A message that remote code was left out of these files."""
    return (
        f"{' and '.join(names)}: {_REMOTE_CODE} is left out, since remote code is never run or "
        "passed on"
    )


def _checked(path: Path, directory: Path) -> Path:
    with _readable(path):
        target = Path(os.path.realpath(path, strict=True))
        info = target.stat()
    require_own_file(path, directory)
    if not stat.S_ISREG(info.st_mode):
        raise _refused(path, "no regular file", "a regular file")
    max_bytes = _MAX_CONFIG_BYTES if path.name.endswith("config.json") else _MAX_BYTES
    if info.st_size > max_bytes:
        raise _refused(path, f"{info.st_size} bytes", f"at most {max_bytes} bytes")
    return target


def json_object(content: Path | bytes) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(content if isinstance(content, bytes) else _read(content))
        if isinstance(value, dict):
            return value
        raise ValueError(f"a {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        path = content if isinstance(content, Path) else Path("a file of the model")
        raise _refused(path, first_line(error), "a readable JSON object") from error


def _read(path: Path) -> bytes:
    with _readable(path), open_regular(path) as file:
        return file.read()


def _readable(path: Path) -> contextlib.AbstractContextManager[None]:
    return system_errors_as(CheckpointError, path, expected="a readable file", remedy=_REMEDY)


def _refused(
    where: Path | str, found: str, expected: str, remedy: str = _REMEDY
) -> CheckpointError:
    return CheckpointError(where, found, expected, remedy)
