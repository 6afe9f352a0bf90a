"""The files of an adapter: its config and its tensors, as peft saves and loads them.

Older files, and files of other programs, name tensors otherwise, hold parameters of the base beside
the adapter's, or are pickled. Peft itself says to which parameter it loads each tensor; what it
leaves out without a word is named here, and what it would leave at its initial values is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from zo2adapters.models.architecture import parameter_names
from zo2adapters.models.pickled import new_reader, write_as_safetensors
from zo2core.checkpoint.export import is_finite, not_finite
from zo2core.checkpoint.shards import (
    DTYPES,
    SafetensorsReader,
    TensorEntry,
    check_float,
    parse_header,
    same_samples,
)
from zo2core.errors import CheckpointError, OutputError, ZO2Warning, system_errors_as
from zo2core.io.direct_file import byte_view

ADAPTER_NAME = "default"  # the adapter's name in the model, peft's default
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
FILE_PREFIX = "base_model.model."  # prefix of the names of layers' parameters
SAVED = f".modules_to_save.{ADAPTER_NAME}."  # part of the names of parameters in a trained copy

_IN_NAMES = re.compile(rf"\.{ADAPTER_NAME}(?=\.|$)")  # the adapter's name
_MOST_BYTES = 8  # of an element
_SMALL = 1 << 20  # bytes of other tensors that any adapter's file may have
_REMEDY = f"use the base that the adapter was made for, and the {CONFIG_FILE} that belongs to it"


class SavedTensors(NamedTuple):
    """What an adapter's file holds, by the names of parameters in the model."""

    values: dict[str, torch.Tensor]  # of the adapter's parameters
    beside: dict[str, TensorEntry]  # parameters of the base that have other values than in the base


Mapped = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def weights_of(directory: Path) -> Path:
    """The file of an adapter's tensors: the one that peft loads."""
    pickled = directory / PICKLED_FILE
    plain = directory / WEIGHTS_FILE
    return pickled if pickled.exists() and not plain.exists() else plain


def without_adapter_name(name: str) -> str:
    """A parameter's name in files, from its name in the model."""
    return _IN_NAMES.sub("", name.replace(SAVED, "."))


def read_adapter(
    path: Path,
    skeleton: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
    mapped: Mapped,
    left_out: Collection[str] = (),
) -> SavedTensors:
    """Read an adapter's file.

    Args:
        path: The file.
        skeleton: The base, with peft's modules in it.
        tensors: The adapter's parameters, of which all must be there, by name.
        names: Their names in a file of peft.
        mapped: Gives the file's tensors by the parameters to which peft loads them.
        left_out: Paths of modules of the base that are not part of the skeleton.

    Raises:
        CheckpointError: if a tensor is missing or does not fit.
    """
    with _as_safetensors(path) as file:
        entries = _by_name(path, parse_header(file))
        of_base = parameter_names(skeleton)
        aliases = {alias: name for name, all_names in of_base.items() for alias in all_names}
        of_the_base = {name: entries.pop(name) for name in [*entries] if name in aliases}
        beside = _tied_once(
            path, {name: (aliases[name], entry) for name, entry in of_the_base.items()}
        )
        for name, entry in beside.items():
            _require_fitting(path, name, entry, skeleton.get_parameter(name))
        if beside and file != path:
            raise CheckpointError(
                f"{path}: {next(iter(beside))}",
                "a parameter of the base in a pickled file",
                "the adapter's parameters alone, or safetensors",
                "load the adapter with peft and save it again",
            )
        _require_size(path, entries, tensors)
        with closing(SafetensorsReader({})) as reader:
            state = {name: _read(reader, entry) for name, entry in entries.items()}
    by_parameter = _mapped(path, mapped, state)
    left = [name for name in by_parameter if name not in tensors]
    values = _fitted(path, by_parameter, tensors, names)
    buffers = skeleton.state_dict().keys() - aliases.keys()
    if buffers & {*left}:
        raise CheckpointError(
            f"{path}: {min(buffers & {*left})}",
            "a buffer of the base",
            "the adapter's parameters, and perhaps parameters of the base",
            "merge the adapter with peft's merge_and_unload, and use the merged model",
        )
    _require_of_text(path, left, left_out)
    if left:
        text = f"{path}: {len(left)} tensor(s) that this base and {CONFIG_FILE} have no place for "
        text += f"are left out, as peft leaves them out, such as {left[0]}"
        warnings.warn(text, ZO2Warning, stacklevel=2)
    return SavedTensors(values, beside)


def _require_of_text(path: Path, names: Iterable[str], left_out: Collection[str]) -> None:
    """Refuse tensors that peft would load to parts for images, which text does not reach."""
    for name in names:
        if any(name.startswith(f"{module}.") for module in left_out):
            raise CheckpointError(
                f"{path}: {name}",
                "an adapter of a part for images",
                "an adapter of the layers that text passes: the others are left out",
                "merge it with peft's merge_and_unload, and use the merged model",
            )


def mapped_by_peft(
    skeleton: PreTrainedModel, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors by the parameters to which peft loads them; it loads nothing here."""
    import peft

    by_parameter: dict[str, torch.Tensor] = {}

    def keep(tensors: Mapping[str, torch.Tensor], *, strict: bool) -> Any:
        by_parameter.update(tensors)
        return SimpleNamespace(missing_keys=[], unexpected_keys=[])

    vars(skeleton)["load_state_dict"] = keep
    try:
        peft.set_peft_model_state_dict(skeleton, dict(state), ADAPTER_NAME)
    finally:
        del vars(skeleton)["load_state_dict"]
    return by_parameter


def read_values(
    path: Path, names: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Read the values of a file that this package or a trainer around it has written, given the
    names there and the shapes and dtypes.
    """
    entries = parse_header(path)
    by_parameter = {
        name: entries[key]._replace(name=name) for name, key in names.items() if key in entries
    }
    with closing(SafetensorsReader({})) as reader:
        values = {name: _read(reader, entry) for name, entry in by_parameter.items()}
    return _fitted(path, values, tensors, names)


@contextmanager
def _as_safetensors(path: Path) -> Iterator[Path]:
    """The file, or a copy of a pickled one in a temporary directory."""
    if path.name != PICKLED_FILE:
        yield path
        return
    with TemporaryDirectory() as folder, new_reader() as reader:
        copy = Path(folder) / WEIGHTS_FILE
        remedy = "free space there, or set TMPDIR to another directory"
        with system_errors_as(OutputError, folder, expected="room for a copy", remedy=remedy):
            write_as_safetensors(reader, path, copy)
        yield copy


def _read(reader: SafetensorsReader, entry: TensorEntry) -> torch.Tensor:
    value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    reader.read_bytes(entry, 0, byte_view(value))
    return value


def _by_name(path: Path, header: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """A file's tensors by their names without peft's prefix and the adapter's name."""
    entries: dict[str, TensorEntry] = {}
    for key, entry in header.items():
        name = without_adapter_name(key.removeprefix(FILE_PREFIX))
        if name in entries:
            found = f"a second tensor for {name}"
            expected = "one tensor for each parameter"
            raise CheckpointError(f"{path}: {key}", found, expected, "remove one of them")
        entries[name] = entry
    return entries


def _tied_once(
    path: Path, of_base: Mapping[str, tuple[str, TensorEntry]]
) -> dict[str, TensorEntry]:
    """Parameters of the base in the file, by their first names."""
    beside: dict[str, TensorEntry] = {}
    for name, entry in of_base.values():
        first = beside.setdefault(name, entry)
        if not same_samples(first, entry):
            raise CheckpointError(
                f"{path}: {entry.name}",
                f"other values than in {first.name}, with which it is one weight in the base",
                "equal values",
                "use a base that does not tie them (tie_word_embeddings: false)",
            )
    return beside


def _require_fitting(
    path: Path, name: str, entry: TensorEntry, parameter: torch.nn.Parameter
) -> None:
    """Refuse a parameter of the base that the base cannot take."""
    check_float(entry)
    if entry.shape == tuple(parameter.shape):
        return
    remedy = _REMEDY
    if entry.shape[1:] == parameter.shape[1:]:
        remedy = f"resize the base's embedding to {entry.shape[0]} tokens with transformers "
        remedy += "(resize_token_embeddings), save it, and use that base"
    expected = f"shape {list(parameter.shape)}, as {name} has it in the base"
    raise CheckpointError(f"{path}: {entry.name}", f"shape {list(entry.shape)}", expected, remedy)


def _require_size(
    path: Path, entries: Mapping[str, TensorEntry], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Refuse to read far more than the adapter's parameters take."""
    nbytes = sum(entry.nbytes for entry in entries.values())
    most = _MOST_BYTES * sum(tensor.numel() for tensor in tensors.values()) + _SMALL
    if nbytes > most:
        expected = f"at most {most}, for this base and {CONFIG_FILE}"
        raise CheckpointError(path, f"{nbytes} bytes of tensors", expected, _REMEDY)


def _mapped(
    path: Path, mapped: Mapped, state: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    try:
        return mapped(state)
    except KeyError as error:  # the copy of a module, which peft looks up
        expected = f"a copy of each of modules_to_save in {CONFIG_FILE}"
        raise CheckpointError(
            f"{path}: {error.args[0]}", "no such tensor", expected, _REMEDY
        ) from error
    except Exception as error:  # any: tensors that do not fit each other surface inside peft
        text = " ".join(str(error).split())[:200]
        found = f"tensors that peft cannot load ({type(error).__name__}: {text})"
        raise CheckpointError(path, found, f"those of {CONFIG_FILE}", _REMEDY) from error


def _fitted(
    path: Path,
    found: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    """The adapter's parameters in their dtypes; one that is missing, or of another shape, or not
    finite is refused.
    """
    values: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        value = found.get(name)
        where = f"{path}: {names[name]}"
        kind = "no such tensor" if value is None else f"{value.dtype} of shape {list(value.shape)}"
        if value is None or value.shape != tensor.shape or not value.is_floating_point():
            expected = f"floats of shape {list(tensor.shape)}, for this base and {CONFIG_FILE}"
            raise CheckpointError(where, kind, expected, _REMEDY)
        values[name] = value.to(tensor.dtype).contiguous()
        if not is_finite(values[name]):
            raise not_finite(where, value, values[name])
    return values
