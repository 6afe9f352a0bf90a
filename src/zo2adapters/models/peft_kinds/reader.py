"""A reader for a base checkpoint and an adapter, whose values are new or from a file of peft."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import save

from zo2adapters.models.peft_kinds.kind import Inserted, OpenedAdapter
from zo2core import ParameterSpec
from zo2core.checkpoint import SafetensorsReader
from zo2core.checkpoint.reader import parse_header
from zo2core.errors import CheckpointError
from zo2core.protocols import TensorReader


class AdapterReader:
    """Reads a base checkpoint and an adapter's initial values, which are made at the first read and kept in memory."""

    def __init__(self, base: TensorReader, adapter: OpenedAdapter) -> None:
        self._base = base
        self._adapter = adapter
        self._values: Mapping[str, torch.Tensor] | None = None
        self._lock = threading.Lock()  # several threads may read first
        self.close = base.close

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the base and of all values of the adapter."""
        values = save({name: value.contiguous() for name, value in sorted(self._first_values().items())})
        return hashlib.sha256(self._base.fingerprint.encode() + hashlib.sha256(values).digest()).hexdigest()

    def page_offset(self, spec: ParameterSpec) -> int | None:
        """None for the adapter, which is in memory. See the contract."""
        return None if self._is_own(spec.name) else self._base.page_offset(spec)

    def itemsize(self, parameter: str) -> int:
        """Bytes of an element."""
        return self._adapter.dtypes[parameter].itemsize if self._is_own(parameter) else self._base.itemsize(parameter)

    def origin(self, parameter: str) -> str:
        """The file of a parameter, or the adapter's name."""
        return self._adapter.where if self._is_own(parameter) else self._base.origin(parameter)

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of one parameter. See the contract."""
        if self._is_own(parameter):
            out.copy_(self._first_values()[parameter][start : start + out.numel()])
        else:
            self._base.read_into(parameter, out, start)

    def _is_own(self, parameter: str) -> bool:
        return parameter in self._adapter.inserted.parameters

    def _first_values(self) -> Mapping[str, torch.Tensor]:
        """The adapter's initial values, each flattened."""
        with self._lock:
            if self._values is None:
                self._values = {name: value.view(-1) for name, value in self._adapter.values().items()}
            return self._values


def read_values(
    path: Path, inserted: Inserted, shapes: Mapping[str, torch.Size], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Read an adapter's values from a file of peft."""
    entries = parse_header(path)
    values = {name: torch.empty(shapes[name], dtype=dtypes[name]) for name in inserted.parameters}
    wanted = {inserted.parameters[name]: value for name, value in values.items()}
    with closing(SafetensorsReader(entries)) as reader:
        for saved_name, value in wanted.items():
            entry = entries.pop(saved_name, None)
            if entry is None or entry.shape != tuple(value.shape):
                raise CheckpointError(
                    f"{path}: {saved_name}",
                    found="no such tensor" if entry is None else f"shape {list(entry.shape)}",
                    expected=f"shape {list(value.shape)}, for this base and the adapter's config",
                    remedy="use the base that the adapter was made for",
                )
            reader.read_into(saved_name, value.view(-1))
    if entries:
        raise CheckpointError(
            f"{path}: {min(entries)}",
            found=f"{len(entries)} tensor(s) that the model with this adapter does not have, this one first",
            expected="the adapter of adapter_config.json, for this base",
            remedy="use the base that the adapter was made for",
        )
    return values
