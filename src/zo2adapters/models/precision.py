"""The dtypes in which parameters are stored, computed with and transferred."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from zo2core.errors import OptionError

_STORED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)
_TRANSFER_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.float8_e4m3fn}
_BACK = "-back"
TRANSFER_DTYPES = ("stored", *_TRANSFER_DTYPES, *(f"{name}{_BACK}" for name in _TRANSFER_DTYPES))  # the option's values
_PROBE_ROUNDS = 20  # measurements, of which the best counts
_FLOAT16_THRESHOLD = 0.5  # of bfloat16's seconds; float16, with its smaller range, must be clearly faster


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of storage, computation and transfer.

    *Exact* precision has one dtype for all three, with MeZO's rounding after every operation. *Mixed* precision stores
    float32, whatever the checkpoint's dtype, and computes under ``torch.autocast``: perturbed weights are rounded once, to
    autocast's dtype. Its results are those of monolithic MeZO in float32 under autocast, bit for bit.

    Args:
        stored: The dtype in which updates are replayed and stored. Blocks are converted as they are read.
        computed: The dtype of matrix products; by default ``stored``.
        transfer_dtype: The dtype in which a block's matrices travel to a device with its own memory, where they are
            converted back to ``stored``: ``torch.bfloat16``, ``torch.float16`` or ``torch.float8_e4m3fn`` with a scale for
            each output row; by default ``stored``. Every device evaluates at these rounded weights, for the same bits.
        transfer_back: Whether blocks are also transferred back in ``transfer_dtype``, which rounds every update to it (ZO2,
            arXiv 2503.12668, section 5.5). Otherwise the host replays updates in ``stored``.

    Raises:
        OptionError: if the dtypes are incompatible.
    """

    stored: torch.dtype
    computed: torch.dtype | None = None
    transfer_dtype: torch.dtype | None = None
    transfer_back: bool = False

    def __post_init__(self) -> None:
        if self.stored not in _STORED:
            raise OptionError(
                "precision.stored",
                found=str(self.stored),
                expected=f"one of {', '.join(map(str, _STORED))}",
                remedy="pass one of these",
            )
        if self.autocast is not None and (self.stored is not torch.float32 or self.autocast not in _HALVES):
            raise OptionError(
                "precision.computed",
                found=f"{self.computed} where {self.stored} is stored",
                expected=f"{self.stored}, or torch.bfloat16 or torch.float16 where torch.float32 is stored",
                remedy="store torch.float32 to compute in 16 bits",
            )
        transfer_dtypes = tuple(_TRANSFER_DTYPES.values())
        if self.carried is not None and (self.stored is not torch.float32 or self.carried not in transfer_dtypes):
            raise OptionError(
                "precision.transfer_dtype",
                found=f"{self.transfer_dtype} where {self.stored} is stored",
                expected=f"{self.stored}, or one of {', '.join(map(str, transfer_dtypes))} where torch.float32 is stored",
                remedy="leave it out, to transfer blocks in the stored dtype",
            )
        if self.transfer_back and self.carried is None:
            raise OptionError(
                "precision.transfer_back",
                found="True without a transfer dtype",
                expected="a transfer dtype other than the stored one",
                remedy="leave it out",
            )

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of ``torch.autocast`` in the forward; None disables it."""
        return None if self.computed in (None, self.stored) else self.computed

    @property
    def carried(self) -> torch.dtype | None:
        """The dtype of transfer, if it is another one than the stored one."""
        return None if self.transfer_dtype in (None, self.stored) else self.transfer_dtype


def choose_precision(
    precision: Precision | str, dtype: torch.dtype, *, is_given: bool, transfer_dtype: str = "stored"
) -> Precision:
    """Make a ``Precision`` from the options of ``open_checkpoint``."""
    chosen = _by_name(precision, dtype, is_given=is_given)
    if transfer_dtype == "stored":
        return chosen
    name = transfer_dtype.removesuffix(_BACK) if isinstance(transfer_dtype, str) else ""
    if name not in _TRANSFER_DTYPES or isinstance(precision, Precision):
        raise OptionError(
            "transfer_dtype",
            found=repr(transfer_dtype),
            expected=f"one of {', '.join(TRANSFER_DTYPES)}, and none with a Precision",
            remedy="pass one of these",
        )
    return replace(chosen, transfer_dtype=_TRANSFER_DTYPES[name], transfer_back=transfer_dtype.endswith(_BACK))


def exact_where_encoded(precision: Precision | str, transfer_dtype: str) -> Precision | str:
    """Return "exact", the only precision of checkpoints with matrices in 8 or 4 bits."""
    if transfer_dtype != "stored" or precision not in ("auto", "exact"):
        option, found = ("transfer_dtype", transfer_dtype) if transfer_dtype != "stored" else ("precision", str(precision))
        raise OptionError(
            option,
            found=f"{found} for quantised weights",
            expected="exact precision and the stored transfer dtype",
            remedy="leave it out, and pass a dtype to compute in another one",
        )
    return "exact"


def _by_name(precision: Precision | str, dtype: torch.dtype, *, is_given: bool) -> Precision:
    if precision == "auto":
        precision = "mixed" if dtype in _HALVES else "exact"
    if precision == "exact":
        return Precision(stored=dtype)
    if precision == "mixed" and (not is_given or dtype in _HALVES):
        return Precision(stored=torch.float32, computed=dtype if is_given else faster_half(product_seconds))
    if isinstance(precision, Precision) and not is_given:
        return precision
    if precision == "mixed" or isinstance(precision, Precision):
        raise OptionError(
            "dtype",
            found=f"{dtype} with precision {precision!r}",
            expected="bfloat16 or float16 with 'mixed', and none with a Precision",
            remedy="leave it out",
        )
    raise OptionError(
        "precision", found=repr(precision), expected="'auto', 'exact', 'mixed' or a Precision", remedy="pass one of these"
    )


def faster_half(seconds: Callable[[torch.dtype], float]) -> torch.dtype:
    """The 16-bit dtype in which products take less time; bfloat16 where they are close."""
    bfloat, half = (seconds(dtype) for dtype in _HALVES)
    return torch.float16 if half < _FLOAT16_THRESHOLD * bfloat else torch.bfloat16


@cache
def product_seconds(dtype: torch.dtype) -> float:
    """Measure a matrix product on this CPU, in CPU seconds of one thread, which do not depend on the machine's load.

    A CPU without instructions for a dtype converts element by element.
    """
    rows, weights = torch.ones(64, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    best, threads = math.inf, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(_PROBE_ROUNDS):
            start = time.thread_time()
            nn.functional.linear(rows, weights)
            best = min(best, time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return best


def autocast_dtype(modules: list[nn.Module], autocast: torch.dtype | None) -> torch.dtype | None:
    """The dtype to which a parameter of these modules is cast before the forward; None: it keeps the stored dtype.

    Weights and biases of linear layers are cast. Norms and embeddings compute in float32, and others are cast inside the
    forward, with the same bits.
    """
    return autocast if modules and all(type(module) is nn.Linear for module in modules) else None
