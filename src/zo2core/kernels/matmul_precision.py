"""The precision of products of float32 matrices, while an engine computes.

torch has one setting for the whole process (``torch.set_float32_matmul_precision``). Here it is in
force during an engine's sweeps, and is put back after each, so that a program around the engine
keeps its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args

import torch

from zo2core.errors import BusyError, OptionError
from zo2core.ranges import MatmulPrecision

EXACT: MatmulPrecision = "highest"
HEADER_KEY = "matmul_precision"  # of a journal's header; absent with the exact precision
_COMPARED = 256  # rows and columns of the matrices whose products are compared


def present_precision() -> MatmulPrecision:
    """The setting of the process.

    Raises:
        OptionError: if its backends are set to different precisions.
    """
    try:
        present: MatmulPrecision = torch.get_float32_matmul_precision()  # type: ignore[assignment]
    except RuntimeError:
        raise OptionError(
            "matmul_precision",
            found="settings of torch.backends that differ",
            expected="one precision for all devices",
            remedy="pass EngineOptions(matmul_precision=...)",
        ) from None
    return present


def recorded_precision(header: Mapping[str, Any] | None) -> MatmulPrecision | None:
    """The precision of a run, by its journal's header; None: the run has not begun."""
    return None if header is None else header.get(HEADER_KEY, EXACT)


def require_precision(value: str) -> None:
    """Refuse a name that torch does not have."""
    names = get_args(MatmulPrecision)
    if value not in names:
        expected = f"{', '.join(names[:-1])} or {names[-1]}"
        raise OptionError("matmul_precision", repr(value), expected, "pass one of them")


class _Setting(NamedTuple):
    """The process's setting: that of all devices, which may be none, and each backend's own."""

    common: str | None
    cuda: str
    onednn: str

    @classmethod
    def present(cls) -> _Setting:
        """The setting as it is."""
        try:
            common = torch.get_float32_matmul_precision()
        except RuntimeError:  # backends were set one by one
            common = None
        backends = torch.backends
        return cls(common, backends.cuda.matmul.fp32_precision, _onednn().fp32_precision)

    def put_back(self) -> None:
        """Set it again.

        Where backends were set one by one, torch still has a common value, which cannot be read:
        one with which it again sees that they differ.
        """
        for common in get_args(MatmulPrecision) if self.common is None else [self.common]:
            torch.set_float32_matmul_precision(common)
            torch.backends.cuda.matmul.fp32_precision = self.cuda
            _onednn().fp32_precision = self.onednn
            if self.present() == self:
                return


def _onednn() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


class _Force:
    """The precision that is in force in this process, as long as an engine computes with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._precision = EXACT
        self._before: _Setting | None = None

    def begin(self, precision: MatmulPrecision) -> None:
        """Set the precision, or join those who compute with it."""
        with self._lock:
            if self._users and precision != self._precision:
                raise BusyError(
                    "matmul_precision",
                    found=f"{precision}, while another engine computes with {self._precision}",
                    expected="one precision at a time: torch has one for the whole process",
                    remedy="pass all engines that compute at the same time the same one",
                )
            if not self._users:
                self._before = _Setting.present()
                torch.set_float32_matmul_precision(precision)
                self._precision = precision
            self._users += 1

    def end(self) -> None:
        """Put the process's own setting back after the last user."""
        with self._lock:
            self._users -= 1
            if not self._users and self._before is not None:
                self._before.put_back()


_FORCE = _Force()  # torch's setting is one for the process, and so is what guards it


@contextmanager
def matmul_precision(precision: MatmulPrecision) -> Iterator[None]:
    """Products of float32 matrices have this precision, and afterwards the process's own again.

    Raises:
        BusyError: if another thread computes with another precision.
    """
    _FORCE.begin(precision)
    try:
        yield
    finally:
        _FORCE.end()


def changes_products(precision: MatmulPrecision, device: torch.device) -> bool:
    """Whether products on a device differ from the exact ones, compared on drawn matrices."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(_COMPARED, _COMPARED, generator=generator).to(device)
    products = []
    for compared in (EXACT, precision):
        with matmul_precision(compared):
            products.append(matrix @ matrix)
    return not torch.equal(*products)
