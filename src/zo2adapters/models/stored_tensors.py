"""The tensors of a checkpoint, matched with the model that its config describes.

Transformers renames and joins tensors as it loads a model. Its own rules run on row numbers in
place of rows, and their result says where each row of a parameter is stored. A parameter is read
from there straight into its memory, and written back. Rules that compute with values, or move
values within a row, are refused.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import save
from transformers import PreTrainedModel, __version__

from zo2adapters.models.architecture import Architecture, is_under, parameter_names
from zo2adapters.models.library_names import (
    WeightConverter,
    WeightRenaming,
    core_model_loading,
    dot_natural_key,
    get_model_conversion_mapping,
    rename_source_key,
)
from zo2adapters.models.quantization import EncodedTensor, malformed_tensor
from zo2core import ParameterSpec
from zo2core.checkpoint.shards import (
    DTYPES,
    Piece,
    TensorEntry,
    check_float,
    same_samples,
)
from zo2core.encodings.forms import MatrixEncoding, MatrixStack
from zo2core.errors import CheckpointError, UnsupportedModelError
from zo2core.io.direct_file import byte_view
from zo2core.protocols import TensorReader
from zo2core.types import CopiedTensor, Encoding, FileRange, SavedForm, SavedPart

# operations that only move whole rows; old versions of transformers have no Split
_ROW_OPERATIONS = {
    getattr(core_model_loading, name, None)
    for name in (
        "MergeModulelist",
        "SplitModulelist",
        "Concatenate",
        "Chunk",
        "Split",
        "Interleave",
        "Transpose",
    )
}
_MAX_ROWS = 1 << 26  # rows of one conversion; their int64 numbers take half a GiB


def encodings_of(
    parameters: Mapping[str, Sequence[Piece]], encoded: Mapping[str, EncodedTensor]
) -> tuple[dict[str, tuple[Piece, ...]], dict[str, Encoding]]:
    """The pieces to read for all parameters, and the encodings of encoded ones."""
    pieces = {name: tuple(of_parameter) for name, of_parameter in parameters.items()}
    encodings = dict[str, Encoding]()
    for name, of_parameter in parameters.items():
        matrices = [
            encoded[piece.entry.name] for piece in of_parameter if piece.entry.name in encoded
        ]
        if not matrices:
            continue
        encodings[name] = _joined_encoding(name, of_parameter, matrices)
        pieces[name] = tuple(
            Piece.whole(part.as_bytes()) for matrix in matrices for part in matrix.parts
        )
    return pieces, encodings


def _joined_encoding(
    name: str, pieces: Sequence[Piece], matrices: Sequence[EncodedTensor]
) -> Encoding:
    """The encoding of a parameter that is one encoded matrix, or a stack of them."""
    stack = tuple(
        (matrix.encoding, matrix.shape[0])
        for matrix in matrices
        if isinstance(matrix.encoding, MatrixEncoding)
    )
    is_whole = all(piece == Piece.whole(piece.entry) for piece in pieces)
    is_encoded = len(matrices) == len(pieces)
    can_stack = len(stack) == len(matrices)
    if is_whole and is_encoded and len(matrices) == 1:
        return matrices[0].encoding
    if is_whole and is_encoded and can_stack:
        return MatrixStack(stack)
    raise _unsupported(
        pieces[0].entry,
        f"a quantised part of {name}",
        "quantised matrices that are each a parameter of the model, or all of a stack of experts",
        "use the unquantised checkpoint",
    )


def match_tensors(
    directory: Path,
    entries: Mapping[str, TensorEntry],
    encoded: Mapping[str, EncodedTensor],
    skeleton: PreTrainedModel,
    architecture: Architecture,
) -> tuple[dict[str, tuple[Piece, ...]], SavedForm]:
    """Find the pieces of each of ``named_parameters()`` that is not left out, and load persistent
    buffers, which are few and small.

    Returns:
        The pieces, and how the checkpoint stores buffers and parameters that have other names or
        parts in the model, and what transformers leaves out.
    """
    pieces, ignored = _pieces_of(entries, skeleton, architecture)
    state = skeleton.state_dict()
    _require_expected(pieces, state)
    parameters: dict[str, tuple[Piece, ...]] = {}
    parts: dict[str, tuple[SavedPart, ...]] = {}
    for name, aliases in parameter_names(skeleton).items():
        if is_under(name, architecture.left_out):
            continue
        copies = [pieces[alias] for alias in aliases if alias in pieces]
        if not copies:
            raise _missing(directory, name, "every parameter of the model")
        _require_equal_ties(copies, name)
        _require_one_float(copies[0], name)
        parameters[name] = (first, *others) = copies[0]
        if others or first != Piece.whole(first.entry) or first.entry.name != name:
            parts[name] = tuple(piece.saved_part for piece in copies[0])
    present = [name for name in state if not is_under(name, architecture.left_out)]
    buffers = {name: state[name] for name in present}
    constants = _load_buffers(directory, pieces, skeleton, buffers)
    copied = {entry.name: _copied(entry, encoded.get(entry.name)) for entry in ignored}
    return parameters, SavedForm(parts, constants, copied)


def _require_expected(
    pieces: Mapping[str, Sequence[Piece]], state: Mapping[str, torch.Tensor]
) -> None:
    """Refuse tensors that the model does not have."""
    unexpected = [name for name in pieces if name not in state]
    if unexpected:
        found = (
            f"{len(unexpected)} tensor(s) that the model of config.json does not have, this one "
            "first"
        )
        remedy = "use the config.json that belongs to these shards, or open them with their head"
        raise malformed_tensor(
            pieces[min(unexpected)][0].entry, found, "the parameters of the config's model", remedy
        )


def _load_buffers(
    directory: Path,
    pieces: Mapping[str, Sequence[Piece]],
    skeleton: PreTrainedModel,
    state: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Load persistent buffers into a skeleton, and return them by their names in the checkpoint."""
    known = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    constants: dict[str, torch.Tensor] = {}
    for name in sorted(state.keys() - known):
        if name not in pieces:
            raise _missing(directory, name, "every buffer that the model's checkpoints keep")
        first, *others = pieces[name]
        if others or first != Piece.whole(first.entry):
            raise _unsupported(
                first.entry,
                f"a part of the buffer {name}",
                "buffers that are each a tensor of their own",
            )
        constants[first.entry.name] = value = read_tensor(first.entry)
        path, _, leaf = name.rpartition(".")
        skeleton.get_submodule(path)._buffers[leaf] = value.to(state[name].dtype)
    return constants


def _copied(entry: TensorEntry, encoded: EncodedTensor | None) -> CopiedTensor:
    parts = (entry,) if encoded is None else encoded.parts
    ranges = tuple(FileRange(part.path, part.start, part.nbytes) for part in parts)
    encoding = None if encoded is None else encoded.encoding
    return CopiedTensor(entry.shape, DTYPES[entry.dtype], ranges, encoding)


def require_dtype(
    parameters: Mapping[str, Sequence[Piece]], skeleton: PreTrainedModel, dtype: torch.dtype
) -> None:
    """Refuse tensors of another dtype than the config's."""
    for name, pieces in parameters.items():
        entry = pieces[0].entry
        if entry.torch_dtype not in (dtype, skeleton.get_parameter(name).dtype):
            # transformers keeps some in another dtype
            remedy = "pass a dtype, to which tensors are converted as they are read"
            raise malformed_tensor(
                entry, f"dtype {entry.dtype}", f"{dtype}, as config.json says", remedy
            )


def read_tensor(entry: TensorEntry) -> torch.Tensor:
    """Read a small tensor of any dtype."""
    value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    byte_view(value)[:] = entry.read()
    return value


_ALL = (
    "get all shards; for a new head, load the model with transformers' class of this head, and "
    "save it"
)


def _missing(directory: Path, name: str, expected: str, remedy: str = _ALL) -> CheckpointError:
    return CheckpointError(directory, f"no tensor {name}", expected, remedy)


def _require_one_float(pieces: Sequence[Piece], name: str) -> None:
    """Refuse a parameter that is not of one floating-point dtype."""
    first = pieces[0].entry
    for entry, _, _ in pieces:
        if check_float(entry) != first.torch_dtype:
            expected = f"{first.dtype}, as in {first.name}: both are in {name}"
            raise malformed_tensor(
                entry, f"dtype {entry.dtype}", expected, "convert the checkpoint to one dtype"
            )


def _is_ignored(name: str, skeleton: PreTrainedModel, architecture: Architecture) -> bool:
    """Whether a tensor is obsolete, as transformers or a declaration says."""
    patterns = [*(skeleton._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    return name.endswith(architecture.ignored or ("\0",)) or any(
        re.search(pattern, name) for pattern in patterns
    )


def _require_equal_ties(copies: Sequence[Sequence[Piece]], name: str) -> None:
    """Refuse a checkpoint whose copies of a tied weight differ: it was trained untied."""
    for copy in copies[1:]:
        for (first, *extent), (other, *other_extent) in zip_longest(
            copies[0], copy, fillvalue=(None, 0, 0)
        ):
            if (
                first is None
                or other is None
                or extent != other_extent
                or not same_samples(first, other)
            ):
                found = f"other values than in {copies[0][0].entry.name}"
                expected = f"equal values: config.json ties both to {name}"
                raise malformed_tensor(
                    copy[0].entry,
                    found,
                    expected,
                    "set tie_word_embeddings to false in config.json",
                )


def _pieces_of(
    entries: Mapping[str, TensorEntry], model: PreTrainedModel, architecture: Architecture
) -> tuple[dict[str, tuple[Piece, ...]], list[TensorEntry]]:
    """Apply transformers' rules to the names of a checkpoint's tensors.

    Returns:
        The pieces of the model's tensors, and the tensors that transformers ignores: those of
        layers that predict several tokens, for example; those that are left out are among them.
    """
    rules = _Rules.of(model)
    state = model.state_dict()
    pieces: dict[str, tuple[Piece, ...]] = {}
    ignored: list[TensorEntry] = []
    joined: dict[str, list[tuple[str, TensorEntry]]] = {}  # target to pattern and tensor
    for name in sorted(entries, key=dot_natural_key):
        entry = entries[name]
        target, pattern = rules.target(name, state)
        is_known = target in state
        is_obsolete = not is_known and any(
            _is_ignored(alias, model, architecture) for alias in (name, target)
        )
        if is_obsolete or is_under(target, architecture.left_out):
            ignored.append(entry)
        elif pattern is not None and is_known:
            joined.setdefault(target, []).append((pattern, entry))
        else:
            _require_shape(entry, target, state)
            _add_pieces(pieces, target, (Piece.whole(entry),))
    for target, sources in joined.items():
        rule = rules.converter(sources[0][0])
        for name, converted in _converted(model, state, target, sources, rule).items():
            _add_pieces(pieces, name, converted)
    return pieces, ignored


class _Rules(NamedTuple):
    """Transformers' rules for the tensors of a model's checkpoints."""

    renamings: list[WeightRenaming]
    converters: list[WeightConverter]
    prefix: str  # of the model without its head

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """The rules for a model."""
        rules = get_model_conversion_mapping(model)
        return cls(
            [rule for rule in rules if isinstance(rule, WeightRenaming)],
            [rule for rule in rules if isinstance(rule, WeightConverter)],
            model.base_model_prefix,
        )

    def target(self, name: str, state: dict[str, Any]) -> tuple[str, str | None]:
        """The model's name of a stored tensor, and the pattern of the rule that converts it."""
        target, pattern = rename_source_key(
            name, self.renamings, self.converters, self.prefix, state
        )
        if target not in state and name in state:
            return rename_source_key(name, [], [], self.prefix, state)
        return target, pattern

    def converter(self, pattern: str) -> WeightConverter:
        """A new copy of the rule that has a pattern."""
        by_pattern = {source: rule for rule in self.converters for source in rule.source_patterns}
        return deepcopy(by_pattern[pattern])


def _require_shape(entry: TensorEntry, target: str, state: Mapping[str, torch.Tensor]) -> None:
    """Refuse a tensor of another shape than the model's."""
    if target in state and entry.shape != tuple(state[target].shape):
        expected = f"{list(state[target].shape)} for {target}, as config.json says"
        raise malformed_tensor(entry, f"shape {list(entry.shape)}", expected)


def _add_pieces(
    pieces: dict[str, tuple[Piece, ...]], target: str, added: tuple[Piece, ...]
) -> None:
    """Add the pieces of one tensor of the model, which has none so far."""
    if target in pieces:
        entry, first = added[0].entry, pieces[target][0].entry
        found = f"a second tensor for {target}, beside {first.name}"
        raise malformed_tensor(entry, found, "one tensor for each parameter", "remove one of them")
    pieces[target] = added


def _converted(
    model: PreTrainedModel,
    state: Mapping[str, torch.Tensor],
    target: str,
    sources: Sequence[tuple[str, TensorEntry]],
    rule: WeightConverter,
) -> dict[str, tuple[Piece, ...]]:
    """Run one rule on row numbers, and return the pieces of every tensor of the model that it
    makes.
    """
    rows = _Rows.of([entry for _, entry in sources])
    first = rows.entries[0]
    if _keeps(rule, first, state.get(target)):
        return {target: (Piece.whole(first),)}
    _require_row_operations(rule, first, target)
    if rows.total > _MAX_ROWS:
        raise _unsupported(
            first, f"{rows.total} rows for {target}", f"at most {_MAX_ROWS} in one conversion"
        )
    for index, (pattern, entry) in enumerate(sources):
        rule.add_tensor(target, entry.name, pattern, rows.numbers(index))  # type: ignore[arg-type]
    try:
        converted: dict[str, Any] = rule.convert(target, model=model, config=model.config)
    except Exception as error:
        # any: tensors that do not fit together surface inside the operations
        raise _misfit(
            first, target, f"tensors that do not fit together ({type(error).__name__}: {error})"
        ) from error
    made: dict[str, torch.Tensor] = {
        name: value[0] if isinstance(value, list) else value for name, value in converted.items()
    }
    numbers = torch.cat([value.reshape(-1) for value in made.values()])
    if not torch.equal(numbers.sort().values, torch.arange(rows.total)):
        raise _misfit(first, target, "rows that no parameter takes")
    for name, value in made.items():
        shape = tuple(state[name].shape) if name in state else ()
        if not rows.make(value, shape):
            _require_whole_rows(rule, first, value)
            found = f"{len(sources)} tensor(s), the first of shape {list(first.shape)}"
            raise _misfit(first, name, found)
    return {name: tuple(rows.pieces(value.reshape(-1))) for name, value in made.items()}


def _keeps(rule: WeightConverter, entry: TensorEntry, made: torch.Tensor | None) -> bool:
    """Whether a rule leaves a tensor as it is, since it has the shape of the model's already."""
    checks = [getattr(operation, "check_dims", False) for operation in rule.operations]
    return checks == [True] and made is not None and entry.shape == tuple(made.shape)


def _require_whole_rows(rule: WeightConverter, entry: TensorEntry, made: torch.Tensor) -> None:
    """Refuse a rule that has made columns of rows."""
    has_columns = made.dim() > 1 and made.shape[-1] != 1
    if has_columns and len(entry.shape) > 1:
        operations = ", ".join(type(operation).__name__ for operation in rule.operations)
        found = f"rows that transformers {__version__} makes columns of ({operations})"
        raise _unsupported(entry, found, "conversions that move whole rows")


def _require_row_operations(rule: WeightConverter, entry: TensorEntry, target: str) -> None:
    """Refuse a rule that does not only move whole rows."""
    for operation in rule.operations:
        if type(operation) not in _ROW_OPERATIONS:
            found = f"{operation!r}, by which transformers {__version__} makes {target}"
            raise _unsupported(entry, found, "conversions that move whole rows")


class _Rows(NamedTuple):
    """The rows of several tensors, numbered one after the other."""

    entries: Sequence[TensorEntry]
    sizes: Sequence[int]  # elements of a row of each tensor
    offsets: Sequence[int]  # the number of each tensor's first row, then of all rows
    are_elements: bool  # whether each element is a row, since a vector has no rows

    @classmethod
    def of(cls, entries: Sequence[TensorEntry]) -> Self:
        """Number the rows of these tensors."""
        are_elements = any(len(entry.shape) < 2 for entry in entries)
        sizes = [1 if are_elements else entry.shape[-1] for entry in entries]
        counts = [
            math.prod(entry.shape) // max(size, 1)
            for entry, size in zip(entries, sizes, strict=True)
        ]
        return cls(entries, sizes, [0, *accumulate(counts)], are_elements)

    @property
    def total(self) -> int:
        """The number of all rows."""
        return self.offsets[-1]

    def numbers(self, index: int) -> torch.Tensor:
        """The numbers of one tensor's rows, in its shape."""
        numbers = torch.arange(self.offsets[index], self.offsets[index + 1])
        return numbers.view(self._shape(self.entries[index].shape))

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of row numbers of a tensor."""
        return shape if self.are_elements else (*shape[:-1], 1)

    def make(self, numbers: torch.Tensor, shape: tuple[int, ...]) -> bool:
        """Whether the rows with these numbers make a tensor of this shape."""
        if tuple(numbers.shape) != self._shape(shape):
            return False
        return self.are_elements or all(size == shape[-1] for size in self.sizes)

    def pieces(self, numbers: torch.Tensor) -> list[Piece]:
        """Join consecutive rows of one tensor into pieces."""
        begins_tensor = torch.isin(numbers, torch.tensor(self.offsets))
        begins_tensor[1:] |= numbers[1:] != numbers[:-1] + 1
        begins_tensor[:1] = True
        starts = [*begins_tensor.nonzero().flatten().tolist(), len(numbers)]
        size = self.sizes[0]
        pieces = []
        for start, stop in pairwise(starts):
            row = int(numbers[start])
            index = bisect_right(self.offsets, row) - 1
            first = (row - self.offsets[index]) * size
            pieces.append(Piece(self.entries[index], first, (stop - start) * size))
        return pieces


def _misfit(entry: TensorEntry, name: str, found: str) -> CheckpointError:
    return malformed_tensor(
        entry, found, f"the tensors from which transformers makes {name}, as config.json says"
    )


_SAVE_AGAIN = (
    "load the model with transformers, save it with save_original_format=False, and use that"
)


def _unsupported(
    entry: TensorEntry, found: str, expected: str, remedy: str = _SAVE_AGAIN
) -> UnsupportedModelError:
    return UnsupportedModelError(f"{entry.path}: {entry.name}", found, expected, remedy)


@dataclass(eq=False)
class OverlaidReader:
    """Reads a checkpoint, of which some parameters have values of their own, made at the first read
    and kept in memory.

    Args:
        base: Reads the other parameters.
        values: Makes the values by parameter, each with a dtype of its own.
        dtypes: The dtypes of these values.
        where: Their origin; None: that of the parameters in the base.
    """

    base: TensorReader
    values: Callable[[], Mapping[str, torch.Tensor]]
    dtypes: Mapping[str, torch.dtype]
    where: str | None = None

    def __post_init__(self) -> None:
        self._made: Mapping[str, torch.Tensor] | None = None
        self._lock = threading.Lock()  # several threads may read first
        self.close = self.base.close

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the base and, where they are not the base's, of all values."""
        if self.where is None:
            return self.base.fingerprint
        values = save(
            {name: value.contiguous() for name, value in sorted(self._flat_values().items())}
        )
        return hashlib.sha256(
            self.base.fingerprint.encode() + hashlib.sha256(values).digest()
        ).hexdigest()

    def page_offset(self, spec: ParameterSpec) -> int | None:
        """None for values in memory."""
        return None if spec.name in self.dtypes else self.base.page_offset(spec)

    def itemsize(self, parameter: str) -> int:
        """Bytes of an element."""
        return (
            self.dtypes[parameter].itemsize
            if parameter in self.dtypes
            else self.base.itemsize(parameter)
        )

    def origin(self, parameter: str) -> str:
        """The file of a parameter, or the name of the values' origin."""
        return (
            self.where if self.where and parameter in self.dtypes else self.base.origin(parameter)
        )

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of one parameter."""
        if parameter in self.dtypes:
            out.copy_(self._flat_values()[parameter][start : start + out.numel()])
        else:
            self.base.read_into(parameter, out, start)

    def _flat_values(self) -> Mapping[str, torch.Tensor]:
        with self._lock:
            if self._made is None:
                self._made = {name: value.view(-1) for name, value in self.values().items()}
            return self._made
