"""A model in a GGUF file, llama.cpp's format: config, names and order of rows by transformers' own
reader of such files.

Matrices stay in the file's blocks, which are decoded at each visit. llama.cpp stores the rows of
rotated heads in pairs, and Gemma's norms plus 1. Transformers' reader itself is asked what it does
to values and rows, which is done when weights are decoded or read. Of byte-level BPE the file's
metadata has names, by which llama.cpp knows how text is split and whether merges bind. Settings
that this reader ignores are refused by name where they change the model.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from zo2adapters.models.library_names import (
    ROPE_INIT_FUNCTIONS,
    TENSOR_PROCESSORS,
    TensorProcessor,
)
from zo2adapters.models.model_files import is_gguf
from zo2adapters.models.quantization import EncodedTensor
from zo2adapters.models.stored_tensors import OverlaidReader, read_tensor
from zo2adapters.optional_package import optional_package
from zo2core.checkpoint.export import is_finite, not_finite
from zo2core.checkpoint.gguf import GGUFFile, StoredArray, StoredText, read_gguf
from zo2core.checkpoint.shards import (
    DTYPE_NAMES,
    Piece,
    SafetensorsReader,
    TensorEntry,
    check_float,
    malformed,
    states_of,
)
from zo2core.encodings.forms import GGUF_BLOCKS, GGUFRows
from zo2core.encodings.gguf import grid_of, row_order
from zo2core.errors import CheckpointError, UnsupportedModelError
from zo2core.protocols import TensorReader

# llama.cpp's names; all are tested
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3")
GGUF_EXTRA = "zo2core[gguf]"
# Llama 3.1's scaling of rotary frequencies, which is not in the metadata
ROTARY_FACTORS = "rope_freqs.weight"
QUANTIZATION_VERSION = "general.quantization_version"
# the writer's own
_REPLACED = ("general.file_type", QUANTIZATION_VERSION, "general.architecture")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# layers; llama.cpp recognises by this number the Gemma 2 whose attention has another scale
_LARGE_GEMMA2 = 46


# architectures of experts in a stack a projection, all of which are routed to
_MIXTURES = ("qwen3moe",)
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
# the projections in each stack of matrices of transformers' mixtures
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
ROUTER = ".ffn_gate_inp."  # whose matrices are float32 in every file


class Place(NamedTuple):
    """A tensor of a GGUF file, which is a parameter of the model or a part of one."""

    tensor: str  # llama.cpp's name
    shape: tuple[int, ...]
    first_row: int = 0  # of the parameter's rows; of a stack, of those of each of its matrices

    def taken_from(self, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of the parameter that are this tensor."""
        if len(self.shape) == 1:
            return parameter
        return parameter.narrow(-2, self.first_row, self.shape[-2])


class LlamaCppLayout:
    """Names, order of rows and values of a model's tensors in GGUF files."""

    def __init__(self, architecture: str, config: PretrainedConfig) -> None:
        self.architecture = architecture
        self._config = config
        reader: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        self._reader = reader(config=config.to_dict())  # undoes what llama.cpp did to tensors

    def names(self, parameters: Iterable[str]) -> dict[str, str]:
        """The names of parameters in the model, by llama.cpp's names; parameters without such a
        name are left out.
        """
        gguf = optional_package("gguf", install=GGUF_EXTRA)
        number = next(
            key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == self.architecture
        )
        known = gguf.get_tensor_name_map(number, self._config.num_hidden_layers)
        names = dict[str, str]()
        for name in parameters:
            path, _, leaf = name.rpartition(".")
            gguf_name = known.get_name(path)
            if gguf_name is not None:
                names[f"{gguf_name}.{leaf}"] = name
        return names

    def places(self, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, list[Place]]:
        """The tensors of each parameter, given their shapes; several of a stack of experts that
        holds two projections. Parameters for which llama.cpp has no tensor are left out.
        """
        named = {mine: theirs for theirs, mine in self.names(parameters).items()}
        places = {name: [Place(named[name], parameters[name])] for name in named}
        for name, shape in parameters.items():
            path, _, leaf = name.rpartition(".")
            if len(shape) == 3 and leaf in _STACKS:
                parts = [f"{path}.{part}.weight" for part in _STACKS[leaf]]
                rows = shape[1] // len(parts)
                tensors = self.names(parts)
                places[name] = [
                    Place(tensor, (shape[0], rows, shape[2]), index * rows)
                    for index, tensor in enumerate(tensors)
                ]
        return {name: found for name, found in places.items() if found}

    def heads(self, name: str, shape: tuple[int, ...]) -> int:
        """Number of heads whose rows llama.cpp stores in pairs; 0 for vectors and for matrices in
        the model's order.
        """
        if len(shape) != 2:
            return 0
        rows = shape[0]
        probe = np.arange(rows, dtype=np.float32)[:, None]
        result = self._processed(name, probe.copy())
        if (
            result.weights is not None
            and result.name == name
            and np.shape(result.weights) == probe.shape
        ):
            if np.array_equal(result.weights, probe):
                return 0
            for heads in {self._config.num_attention_heads, self._config.num_key_value_heads} - {0}:
                if rows % (2 * heads) == 0 and np.array_equal(
                    result.weights[_order(rows, heads).numpy()], probe
                ):
                    return int(heads)
        found, expected = (
            "a matrix whose values transformers' reader changes",
            "matrices that are stored row by row",
        )
        raise UnsupportedModelError(
            name, found, expected, "use the model in the Hugging Face layout"
        )

    def changes(self, name: str, length: int) -> bool:
        """Whether a vector has other values in the file than in the model."""
        probe = torch.arange(length, dtype=torch.float32)
        return not self.read(name, probe).equal(probe)

    def read(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """Convert a vector from the file's values to the model's: float32."""
        processed = self._processed(name, stored.numpy().copy()).weights
        return torch.from_numpy(np.ascontiguousarray(processed, dtype=np.float32))

    def _processed(self, name: str, values: Any) -> Any:
        """The tensor as transformers' reader converts it."""
        try:
            return self._reader.process(weights=values, name=name)
        except (ValueError, ArithmeticError, TypeError) as error:
            found = f"{len(values)} rows, which do not fit the metadata ({error})"
            remedy = "download the file again"
            raise CheckpointError(
                name, found, "as many rows as the heads of the metadata have", remedy
            ) from error

    def write(self, name: str, weights: torch.Tensor) -> torch.Tensor:
        """Convert a tensor from the model's values to the file's, float32: the inverse of
        reading.
        """
        if len(weights.shape) > 2:
            return weights
        if len(weights.shape) == 2:
            heads = self.heads(name, tuple(weights.shape))
            return weights[_order(len(weights), heads)] if heads else weights
        zeros = torch.zeros_like(weights)
        added = self.read(name, zeros)
        if not added.equal(zeros):  # Gemma's norms
            return weights - added
        places = self.read(name, torch.arange(len(weights), dtype=torch.float32)).long()
        return torch.empty_like(weights).index_copy_(0, places, weights)


def _order(rows: int, heads: int) -> torch.Tensor:
    """For each stored row, its index in the model's matrix."""
    return row_order(GGUFRows("F32", heads), rows, torch.device("cpu"))


class GGUFModel:
    """The config and the tensors of a model in a GGUF file, before the model is built."""

    converts = True  # norms are float32 in every file
    small: Sequence[Path] = ()  # files beside the weights

    def __init__(self, path: Path) -> None:
        self.where = self.described_in = path
        self.file = read_gguf(path)
        self.entries: Mapping[str, TensorEntry] = self.file.tensors
        self.states = {path: self.file.state, **states_of(self.entries.values())}
        self._architecture = str(self.file.metadata.get("general.architecture"))
        if self._architecture not in GGUF_ARCHITECTURES:
            raise self._refused(
                f"architecture {self._architecture[:40]!r}",
                f"one of {', '.join(GGUF_ARCHITECTURES)}",
            )
        optional_package("gguf", install=GGUF_EXTRA)
        self._require_known_settings()
        self.config = self._read_config()
        self.layout = LlamaCppLayout(self._architecture, self.config)

    @property
    def is_encoded(self) -> bool:
        """Whether there are tensors in blocks of codes, or of rows in another order."""
        tensors = self.entries.items()
        return any(
            entry.dtype not in _FLOATS or self.layout.heads(name, entry.shape)
            for name, entry in tensors
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrices; float32, in which codes are decoded, if they are encoded."""
        dtypes = {
            entry.dtype
            for entry in self.entries.values()
            if len(entry.shape) > 1 and ROUTER not in entry.name
        }
        return _FLOATS.get(dtypes.pop(), torch.float32) if len(dtypes) == 1 else torch.float32

    def tensors(
        self, skeleton: PreTrainedModel
    ) -> tuple[dict[str, TensorEntry], dict[str, EncodedTensor]]:
        """All tensors as if none were encoded, and the encoded ones, by their names in a model."""
        for kind in {entry.dtype for entry in self.entries.values()}:
            grid_of(kind)  # refused here, not at the first step, where it is not installed
        names = self.layout.names(skeleton.state_dict())
        # the name in the model, and the heads whose rows are in pairs
        located: list[tuple[str, TensorEntry, int]] = []
        for entry in self.entries.values():
            if (experts := _EXPERTS.fullmatch(entry.name)) is not None and len(entry.shape) == 3:
                matrices = _matrices(
                    entry, f"model.layers.{experts[1]}.mlp.experts.{{}}.{experts[2]}_proj.weight"
                )
                located += [(expert.name, expert, 0) for expert in matrices]
            elif entry.name in names:
                located.append(
                    (names[entry.name], entry, self.layout.heads(entry.name, entry.shape))
                )
            elif entry.name != ROTARY_FACTORS:
                raise CheckpointError(
                    f"{entry.path}: {entry.name}",
                    f"a tensor that transformers' {type(skeleton).__name__} does not have",
                    "the tensors of this model",
                    "use a file that llama.cpp's converter made of a model of this kind",
                )
        entries = dict[str, TensorEntry]()
        encoded = dict[str, EncodedTensor]()
        self._processed: dict[str, TensorEntry] = {}
        for name, entry, heads in located:
            entries[name] = entry._replace(name=name)
            if entry.dtype not in _FLOATS or heads:
                if len(entry.shape) != 2:
                    raise self._refused(
                        f"{entry.name} in {entry.dtype}, of shape {list(entry.shape)}",
                        "matrices in codes",
                    )
                entries[name] = entries[name]._replace(dtype=DTYPE_NAMES[self.dtype])
                encoded[name] = EncodedTensor(GGUFRows(entry.dtype, heads), entry.shape, (entry,))
            elif len(entry.shape) == 1 and self.layout.changes(entry.name, entry.shape[0]):
                self._processed[name] = entry
        return entries, encoded

    def reader(self, pieces: Mapping[str, Sequence[Piece]]) -> TensorReader:
        """A reader of the parameters that consist of these pieces."""
        base = SafetensorsReader(pieces)
        names = {name: piece.entry.name for name, (piece, *_) in pieces.items()}
        vectors = {
            name: self._processed[tensor]
            for name, tensor in names.items()
            if tensor in self._processed
        }

        def values() -> dict[str, torch.Tensor]:
            read = {name: torch.empty(entry.shape) for name, entry in vectors.items()}
            for name, stored in read.items():
                base.read_into(name, stored)
            return {
                name: self.layout.read(vectors[name].name, stored) for name, stored in read.items()
            }

        dtypes = {name: _FLOATS[entry.dtype] for name, entry in vectors.items()}
        return OverlaidReader(base, values, dtypes) if vectors else base

    def companions(
        self, skeleton: PreTrainedModel, dtype: torch.dtype
    ) -> Mapping[str, Path | bytes]:
        """The files beside weights that are exported in the Hugging Face layout: config and
        tokenizer.
        """
        config = {**self.config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
        config["architectures"] = [type(skeleton).__name__]
        named = [
            self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
            for name in ("eos", *FURTHER_ENDS)
        ]
        ends = {"eos_token_id": [token for token in named if token is not None] or None}
        return _Companions({"config.json": config, "generation_config.json": ends}, self.where)

    def _read_config(self) -> PretrainedConfig:
        try:
            with TemporaryDirectory() as directory:
                # Transformers takes seconds to read a whole vocabulary, and the config needs only
                # its size.
                short = {
                    key: value
                    for key, value in self.file.metadata.items()
                    if isinstance(value, (int, float, str))
                }
                tokens = self.file.metadata.get("tokenizer.ggml.tokens")
                key = f"{self._architecture}.vocab_size"
                size = (
                    {key: tokens.length}
                    if isinstance(tokens, StoredArray) and key not in short
                    else {}
                )
                copied = replace(self.file, metadata=short)
                write_gguf(Path(directory) / "model.gguf", self._architecture, size, [], [], copied)
                config: PretrainedConfig = AutoConfig.from_pretrained(
                    directory, gguf_file="model.gguf", trust_remote_code=False
                )
        except Exception as error:
            # any: metadata of wrong types or ranges lead transformers to all kinds of errors
            first = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise self._refused(
                f"metadata that transformers cannot read ({first})", "metadata of such a model"
            ) from error
        # transformers saw no tensors
        config.tie_word_embeddings = "output.weight" not in self.entries
        config.name_or_path = ""
        self._complete(config)
        if self._architecture in _MIXTURES:
            config.moe_intermediate_size = self._experts_width()
        factors = rotary_factors(self.file)
        if factors is not None:
            config.rope_parameters = self._scaled_rotary(config, factors)
        return config

    def _complete(self, config: PretrainedConfig) -> None:
        """Set what transformers' reader leaves at its defaults: the size of heads, and whether
        projections have biases, which their tensors show.
        """
        head = self.file.metadata.get(f"{self._architecture}.attention.key_length")
        if type(head) is int and 0 < head < 1 << 20 and hasattr(config, "head_dim"):
            config.head_dim = head
        if self._architecture == "llama":
            config.attention_bias = "blk.0.attn_q.bias" in self.entries
            config.mlp_bias = "blk.0.ffn_up.bias" in self.entries

    def _experts_width(self) -> int:
        """The number of each expert's hidden features, which transformers' reader leaves at its
        default.
        """
        width = self.file.metadata.get(f"{self._architecture}.expert_feed_forward_length")
        if type(width) is not int or not 0 < width < 1 << 31:
            raise self._refused(
                f"expert_feed_forward_length {str(width)[:40]}", "the width of an expert"
            )
        return width

    def _require_known_settings(self) -> None:
        """Refuse settings that change the model's forward and that transformers' reader ignores."""
        architecture = self._architecture
        settings = {
            key.removeprefix(f"{architecture}."): value for key, value in self.file.metadata.items()
        }
        scaling, factor = (settings.get(f"rope.scaling.{key}") for key in ("type", "factor"))
        scale, norm = (settings.get(f"expert_weights_{key}") for key in ("scale", "norm"))
        rotated = settings.get("rope.dimension_count")
        head = _head_size(settings, otherwise=rotated)
        refused = [
            (
                scaling not in (None, "none") or factor not in (None, 0.0, 1.0),
                f"rope.scaling.type {str(scaling)[:40]!r}, factor {str(factor)[:40]}",
                "no scaled rotary tables",
            ),
            (
                settings.get("expert_count") and architecture not in _MIXTURES,
                "a mixture of experts",
                f"a dense model, or one of {', '.join(_MIXTURES)}",
            ),
            (
                scale not in (None, 0.0, 1.0) or norm not in (None, True),
                f"expert_weights_scale {scale}, expert_weights_norm {norm}",
                "1 and true, or neither",
            ),
            (
                architecture == "phi3" and rotated not in (None, head),
                f"rope.dimension_count {str(rotated)[:40]}",
                f"{head}, a whole head",
            ),
            (
                architecture == "gemma2" and settings.get("block_count") == _LARGE_GEMMA2,
                "Gemma 2 of 27 billion parameters",
                "a smaller one, whose attention is scaled by its head's size",
            ),
        ]
        for is_refused, found, expected in refused:
            if is_refused:
                raise self._refused(found, expected)

    def _scaled_rotary(self, config: PretrainedConfig, values: torch.Tensor) -> dict[str, Any]:
        """The rotary settings of Llama 3.1 and 3.2, if the file's factors follow from them; files
        have only the factors.
        """
        plain = dict(config.rope_parameters or {})
        scaled: dict[str, Any] = {
            "rope_type": "llama3",
            "rope_theta": plain.get("rope_theta"),
            "factor": float(values.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if bool((values == 1).all()):
            return plain
        head = config.head_dim or config.hidden_size // config.num_attention_heads
        if (
            values.isfinite().all()
            and scaled["factor"] > 1
            and scaled["rope_theta"]
            and 2 * len(values) == head
        ):
            config.rope_parameters = scaled
            if torch.allclose(values, scaled_rotary_factors(config), rtol=1e-5, atol=0.0):
                return scaled
        raise self._refused(
            f"{ROTARY_FACTORS} of other factors than Llama 3.1's",
            "tables that follow from the config",
        )

    def _refused(self, found: str, expected: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            self.where, found, expected, "use the model in the Hugging Face layout"
        )


def _head_size(settings: Mapping[str, Any], *, otherwise: Any) -> Any:
    """The size of an attention head that follows from the number of heads, if the file tells it."""
    width = settings.get("embedding_length")
    heads = settings.get("attention.head_count")
    if isinstance(width, int) and isinstance(heads, int) and heads:
        return width // heads
    return otherwise


def rotary_factors(file: GGUFFile) -> torch.Tensor | None:
    """The factors by which a file divides rotary frequencies, float32; None if it has none."""
    entry = file.tensors.get(ROTARY_FACTORS)
    if entry is None:
        return None
    check_float(entry)
    if len(entry.shape) != 1:
        raise malformed(f"{entry.path}: {entry.name}", f"shape {list(entry.shape)}", "a vector")
    return read_tensor(entry).float()


def scaled_rotary_factors(config: PretrainedConfig) -> torch.Tensor:
    """The factors of Llama 3.1's rotary frequencies, float32."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    steps = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32) / (2 * len(scaled))
    return torch.div(1.0 / config.rope_parameters["rope_theta"] ** steps, scaled)


def _matrices(stack: TensorEntry, name: str) -> Iterator[TensorEntry]:
    """The matrices of a stack, named as a checkpoint of transformers 4 names them."""
    count, *shape = stack.shape
    nbytes = stack.nbytes // count
    for index in range(count):
        start = stack.start + index * nbytes
        yield stack._replace(
            name=name.format(index), shape=tuple(shape), start=start, nbytes=nbytes
        )


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    infos: Sequence[tuple[str, Sequence[int], str]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    copied: GGUFFile | None = None,
    *,
    origin: object = "weights",
) -> None:
    """Write a GGUF file tensor by tensor, each rounded to its type.

    Args:
        path: Path of the new file.
        architecture: Its name in llama.cpp.
        metadata: Values by key: integers are uint32, floats float32.
        infos: Names, shapes and types of all tensors.
        tensors: The tensors by name, float32, in the same order.
        copied: A file whose metadata goes before these values.
        origin: Name of the tensors' file, for the error that refuses numbers that are not finite.
    """
    gguf = optional_package("gguf", install=GGUF_EXTRA)
    types = gguf.GGUFValueType
    file = gguf.GGUFWriter(path, architecture)
    with contextlib.closing(file):
        for key, value in ({} if copied is None else copied.metadata).items():
            assert copied is not None
            if key in _REPLACED or key.startswith("split."):
                continue
            if not isinstance(value, StoredArray):
                plain = copied.text(key) if isinstance(value, StoredText) else value
                file.add_key_value(key, plain, types(copied.kinds[key]))
            elif value.length:  # the writer takes no empty arrays
                file.add_key_value(
                    key, list(copied.array(key)), types.ARRAY, sub_type=types(value.kind)
                )
        for key, value in metadata.items():
            if isinstance(value, list):
                file.add_array(key, value)
            else:
                is_integer = isinstance(value, int) and not isinstance(value, bool)
                file.add_key_value(
                    key, value, types.UINT32 if is_integer else types.get_type(value)
                )
        for name, shape, kind in infos:
            block = GGUF_BLOCKS[kind]
            stored = (*shape[:-1], shape[-1] // block.weights * block.nbytes)
            raw = gguf.GGMLQuantizationType[kind]
            file.add_tensor_info(
                name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=raw
            )
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_ti_data_to_file()
        for (expected, _, kind), (name, weights) in zip(infos, tensors, strict=True):
            assert name == expected, f"{name} is written where {expected} comes next"
            coded = _coded(f"{origin}: {name}", weights, gguf.GGMLQuantizationType[kind])
            file.write_tensor_data(np.ascontiguousarray(coded).view(np.uint8))


def _coded(where: str, weights: torch.Tensor, kind: Any) -> np.ndarray[Any, Any]:
    """Weights rounded to a type of GGUF's, whose numbers and scales have to be finite."""
    import gguf

    if not is_finite(weights):
        raise not_finite(where, weights, weights)
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        coded: np.ndarray[Any, Any] = gguf.quantize(weights.contiguous().numpy(), kind)
        written = torch.from_numpy(gguf.dequantize(coded, kind))
    if not is_finite(written):
        raise not_finite(where, weights, written, kind.name)
    return coded


class _Companions(Mapping[str, Path | bytes]):
    """Config and tokenizer files; the tokenizer is read only if its files are asked for."""

    def __init__(self, configs: Mapping[str, Any], path: Path) -> None:
        self._configs = {
            name: json.dumps(config, indent=2).encode() + b"\n" for name, config in configs.items()
        }
        self._path = path

    @cached_property
    def _files(self) -> dict[str, Path | bytes]:
        with TemporaryDirectory() as written:
            gguf_tokenizer(self._path).save_pretrained(written)
            tokenizer = {path.name: path.read_bytes() for path in Path(written).iterdir()}
        return {**tokenizer, **self._configs}

    def __getitem__(self, name: str) -> Path | bytes:
        return self._configs[name] if name in self._configs else self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextlib.contextmanager
def isolated(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A directory that holds a link to a GGUF file and nothing else, and the further arguments of
    ``from_pretrained``.

    Transformers would read other files beside it, too, such as a tokenizer's config.
    """
    with TemporaryDirectory() as directory:
        link = Path(directory) / "model.gguf"
        link.symlink_to(path.resolve())
        yield Path(directory), {"gguf_file": link.name}


def load_whole(auto_class: Any, path: Path, dtype: torch.dtype | str | None) -> Any:
    """Load the whole model of a directory or a GGUF file with transformers, decoded."""
    with contextlib.ExitStack() as stack:
        directory, options = stack.enter_context(isolated(path)) if is_gguf(path) else (path, {})
        return auto_class.from_pretrained(
            directory, dtype=dtype, trust_remote_code=False, **options
        )


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that a GGUF file describes."""
    file = read_gguf(path)
    if file.metadata.get("tokenizer.ggml.model") == "gpt2":
        return byte_level_tokenizer(file)
    with isolated(path) as (directory, options):
        # The auto class reads the vocabulary twice, once for a config that decides nothing here.
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
            directory, **options
        )
    return tokenizer


# llama.cpp's types of tokens
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
# tokens at which llama.cpp stops beside EOS: the end of a turn, and of a message
FURTHER_ENDS = ("eot", "eom")
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# by exports, each for all that split so
_WRITTEN = ("gpt-2", "smollm", "llama-bpe", "tekken", "qwen2", "gpt-4o")

_DIGIT = r"\p{N}"
# GPT-2's
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT, _SPACE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_SHORT}|{_MARKS}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACE}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = _QWEN2.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(
    r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+"
)
_GPT_4O, _TEKKEN = (
    rf"{_MARKS}{_UPPER}*{_LOWER}+{short}|{_MARKS}{_UPPER}+{_LOWER}*{short}|\p{{N}}{digits}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACE}"
    for short, digits in ((f"{_SHORT}?", "{1,3}"), ("", ""))
)
_GROUPS = {
    (_WORDS,): "gpt-2, phi-2, olmo, mpt, jais, trillion, exaone4, gigachat, a.x-4.0, mellum, "
    "granite-docling",
    (_DIGIT, _WORDS): "smollm, starcoder, refact, command-r, codeshell, exaone, minerva-7b",
    (_LLAMA3,): (
        "llama3, llama-v3, llama-bpe, falcon3, falcon-h1, pixtral, midm-2.0, lfm2, jina-v5-nano, "
        "dbrx, smaug-bpe, "
        "glm4, chatglm-bpe"
    ),
    (_TEKKEN,): "tekken",
    (
        _QWEN2,
    ): "qwen2, deepseek-r1-qwen, kormo, f2llmv2, megrez, stablelm2, hunyuan, solar-open, grok-2",
    (_QWEN35,): "qwen35",
    (_GPT_4O,): "gpt-4o, llama4, kanana2, talkie, minimax-m2",
    (r"[\p{P}$+<=>^~|]+", _WORDS, r"\p{N}+", "[0-9]{3}"): "default",
}
# The patterns that split text one after the other, by llama.cpp's names (llama-vocab.cpp).
_SPLITS = {name: patterns for patterns, names in _GROUPS.items() for name in names.split(", ")}
# All of these patterns, each of which takes a time proportional to the text.
SPLIT_PATTERNS = frozenset(pattern for patterns in _GROUPS for pattern in patterns)
# Names of vocabularies that take a whole piece which is a token, whatever the merges; they begin
# with BOS by default.
_WHOLE = {name for name in _SPLITS if _SPLITS[name] in (_SPLITS["llama3"], _SPLITS["tekken"])}
_WHOLE -= {"dbrx", "smaug-bpe", "glm4", "chatglm-bpe"}


def byte_level_tokenizer(file: GGUFFile) -> PreTrainedTokenizerBase:
    """The tokenizer that a file with byte-level BPE describes.

    Transformers' own reader splits by few names, merges what llama.cpp takes whole, and gives
    special tokens that are written in other characters, such as DeepSeek's, ids beyond the
    vocabulary.
    """
    values: dict[str, Any] = {
        key.removeprefix("tokenizer.ggml."): file.text(key)
        if isinstance(value, StoredText)
        else value
        for key, value in file.metadata.items()
    }
    name = _require_known_split(values.get("pre"), file)
    tokens = [str(token) for token in file.array("tokenizer.ggml.tokens")]
    backend = _byte_level_backend(file, name, tokens)
    kinds = file.array("tokenizer.ggml.token_type") if "token_type" in values else ()
    backend.add_tokens(_added_tokens(tokens, kinds))
    ids = {attribute: values.get(f"{called}_token_id") for called, attribute in _SPECIAL.items()}
    special = {attribute: tokens[index] for attribute, index in ids.items() if index is not None}
    first = [special["bos_token"]] if values.get("add_bos_token", name in _WHOLE) else []
    last = [special["eos_token"]] if values.get("add_eos_token") else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(token, tokens.index(token)) for token in {*first, *last}],
        )
    template = values.get("tokenizer.chat_template")
    # its constructor is untyped
    make: Callable[..., PreTrainedTokenizerBase] = PreTrainedTokenizerFast
    return make(
        tokenizer_object=backend,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _require_known_split(name: object, file: GGUFFile) -> str:
    """The name of a known way to split text; others are refused."""
    if isinstance(name, str) and name in _SPLITS:
        return name
    raise UnsupportedModelError(
        f"{file.path}: tokenizer.ggml.pre",
        "none" if name is None else repr(str(name)[:40]),
        f"the name of a known way to split text: {', '.join(_SPLITS)}",
        "use a file of a newer convert_hf_to_gguf.py, or the model in the Hugging Face layout",
    )


def _byte_level_backend(file: GGUFFile, name: str, tokens: Sequence[str]) -> Any:
    """A tokenizer that splits text as this name says, and merges it as the file does."""
    merges: Any = [tuple(str(merge).split(" ")) for merge in file.array("tokenizer.ggml.merges")]
    model: Any = BPE(
        {token: index for index, token in enumerate(tokens)}, merges, ignore_merges=name in _WHOLE
    )
    backend: Any = Tokenizer(model)
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()  # of these models' own tokenizers
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[name]
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _added_tokens(tokens: Sequence[str], kinds: Iterable[object]) -> list[AddedToken]:
    """The tokens that are found in text before it is split."""
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def unwritable(where: Path, found: str, expected: str) -> UnsupportedModelError:
    """The error for a model that cannot be written as a GGUF file."""
    remedy = (
        "export in the Hugging Face layout, and convert that by llama.cpp's convert_hf_to_gguf.py"
    )
    return UnsupportedModelError(where, found, expected, remedy)


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, where: Path) -> dict[str, Any]:
    """The metadata of a tokenizer, by key."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    name = _split_name(backend, where)
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(by_id) >= size:
        expected = f"ids below {size}, the rows of the embedding"
        remedy = "use the tokenizer that belongs to the model"
        raise UnsupportedModelError(where, f"a token with id {max(by_id)}", expected, remedy)
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [by_id.get(index, f"[PAD{index}]") for index in range(size)],
        "tokenizer.ggml.token_type": _token_types(backend, by_id, size),
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in backend["model"]["merges"]
        ],
    }
    for called, attribute in _SPECIAL.items():
        token = getattr(tokenizer, f"{attribute}_id")
        if isinstance(token, int):
            values[f"tokenizer.ggml.{called}_token_id"] = token
    first = tokenizer("a").input_ids[:1]
    values["tokenizer.ggml.add_bos_token"] = tokenizer.bos_token_id is not None and first == [
        tokenizer.bos_token_id
    ]
    if isinstance(tokenizer.chat_template, str):
        values["tokenizer.chat_template"] = tokenizer.chat_template
    return values


def _split_name(backend: dict[str, Any], where: Path) -> str:
    """llama.cpp's name of the way in which a tokenizer splits and merges text."""
    splits = _splits(backend)
    is_whole = bool(backend["model"].get("ignore_merges"))
    for name in _WRITTEN:
        if _SPLITS[name] == splits and (name in _WHOLE) == is_whole:
            return name
    steps = " and ".join(step["type"] for step in _steps(backend)) or "whole text"
    kind = f"{backend['model']['type']} over {steps}{', whole tokens first' if is_whole else ''}"
    expected = f"byte-level BPE that splits and merges text as {', '.join(_WRITTEN)}"
    raise unwritable(where, f"a tokenizer of {kind[:200]}", expected)


def _token_types(backend: dict[str, Any], by_id: Collection[int], size: int) -> list[int]:
    """llama.cpp's type of each id, of which some have no token."""
    added = {
        token["id"]: _CONTROL if token["special"] else _USER_DEFINED
        for token in backend["added_tokens"]
    }
    return [added.get(i, _NORMAL) if i in by_id else _UNUSED for i in range(size)]


def _splits(backend: dict[str, Any]) -> tuple[str, ...] | None:
    """The patterns that split text one after the other; None if it is split, normalised or encoded
    in another way.
    """
    if (
        backend["model"]["type"] != "BPE"
        or (backend["normalizer"] or {"type": "NFC"})["type"] != "NFC"
    ):
        return None
    *steps, last = _steps(backend) or [{"type": "none"}]
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        return None
    patterns: list[str] = []
    for step in steps:
        is_split = (
            step["type"] == "Split"
            and step["behavior"] == "Isolated"
            and "Regex" in step["pattern"]
        )
        if not is_split and not (step["type"] == "Digits" and step["individual_digits"]):
            return None
        patterns.append(step["pattern"]["Regex"] if is_split else _DIGIT)
    return (*patterns, *((_WORDS,) if last.get("use_regex", True) else ()))


def _steps(backend: dict[str, Any]) -> list[dict[str, Any]]:
    step = backend["pre_tokenizer"]
    return [] if step is None else step.get("pretokenizers", [step])
