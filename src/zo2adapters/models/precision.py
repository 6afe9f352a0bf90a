"""In which dtypes a parameter is stored, computed with and carried."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn

from zo2core import OptionError

_STORED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)
_TRANSFER_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.float8_e4m3fn}
_BACK = "-back"
TRANSFER_DTYPES = ("stored", *_TRANSFER_DTYPES, *(f"{name}{_BACK}" for name in _TRANSFER_DTYPES))  # what may be asked for
_ROUNDS = 20  # of the probe; the best counts
_CLEARLY = 0.5  # times bfloat16's seconds: float16 has fewer exponents, so it has to be worth it


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Three dtypes of a parameter.

    *Exact* precision has one dtype for all three, with MeZO's rounding after every operation. *Mixed* precision stores
    float32, whatever the checkpoint is in, and computes under ``torch.autocast``: the perturbed weights are rounded once, to
    the dtype that autocast would have cast them to. Its results are those of monolithic MeZO in float32 under autocast, bit
    for bit.

    Args:
        stored: In which updates are replayed and kept. A block is converted as it is read; the checkpoint stays as it is.
        computed: In which matrix products run; by default what is stored.
        transfer_dtype: In which a block's matrices travel to a device with memory of its own, whose weights they are
            then, widened
            again: ``torch.bfloat16``, ``torch.float16`` or ``torch.float8_e4m3fn`` with a scale for each output row. By
            default blocks travel as they are stored. Evaluations are made at these weights wherever they are computed, so
            that every device gives the same bits.
        transfer_back: Whether what is carried also comes back, so that every update is rounded to it (ZO2,
            arXiv 2503.12668, section 5.5). Without, the host replays in what is stored.

    Raises:
        OptionError: if the dtypes do not go together.
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
                remedy="choose one of these",
            )
        if self.autocast is not None and (self.stored is not torch.float32 or self.autocast not in _HALVES):
            raise OptionError(
                "precision.computed",
                found=f"{self.computed} where {self.stored} is stored",
                expected=f"{self.stored}, or torch.bfloat16 or torch.float16 where torch.float32 is stored",
                remedy="store torch.float32 to compute in 16 bits",
            )
        offered = tuple(_TRANSFER_DTYPES.values())
        if self.transfer_dtype not in (None, self.stored) and (
            self.stored is not torch.float32 or self.transfer_dtype not in offered
        ):
            raise OptionError(
                "precision.transfer_dtype",
                found=f"{self.transfer_dtype} where {self.stored} is stored",
                expected=f"{self.stored}, or one of {', '.join(map(str, offered))} where torch.float32 is stored",
                remedy="leave it out: blocks travel as they are stored",
            )
        if self.transfer_back and self.transfer_dtype in (None, self.stored):
            raise OptionError(
                "precision.transfer_back",
                found="True where blocks travel as they are stored",
                expected="a dtype in which they are carried",
                remedy="leave it out",
            )

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of ``torch.autocast`` in the forward; None runs without."""
        return None if self.computed in (None, self.stored) else self.computed


def choose_precision(
    precision: Precision | str, dtype: torch.dtype, *, given: bool, transfer_dtype: str = "stored"
) -> Precision:
    """The precision by its name, for a dtype, and what is carried by its name.

    Args:
        precision: As for ``open_checkpoint``, and so is what follows.
        dtype: The checkpoint's, or the one that a caller gave.
        given: Whether a caller gave it.
        transfer_dtype: One of ``TRANSFER_DTYPES``.

    Raises:
        OptionError: if a name is unknown, or the dtypes do not go together.
    """
    chosen = _by_name(precision, dtype, given=given)
    if transfer_dtype == "stored":
        return chosen
    name = transfer_dtype.removesuffix(_BACK) if isinstance(transfer_dtype, str) else ""
    if name not in _TRANSFER_DTYPES or isinstance(precision, Precision):
        raise OptionError(
            "transfer_dtype",
            found=repr(transfer_dtype),
            expected=f"one of {', '.join(TRANSFER_DTYPES)}, and none beside a Precision",
            remedy="choose one of these",
        )
    return replace(chosen, transfer_dtype=_TRANSFER_DTYPES[name], transfer_back=transfer_dtype.endswith(_BACK))


def exact_where_encoded(precision: Precision | str, transfer_dtype: str) -> Precision | str:
    """The precision of a checkpoint whose matrices are stored in 8 or 4 bits: they are decoded to one dtype.

    Raises:
        OptionError: if another was asked for.
    """
    if transfer_dtype != "stored" or precision not in ("auto", "exact"):
        option, found = ("transfer_dtype", transfer_dtype) if transfer_dtype != "stored" else ("precision", str(precision))
        raise OptionError(
            option,
            found=f"{found} for quantised weights",
            expected="exact precision: matrices travel as they are stored, and are decoded to one dtype",
            remedy="leave it out, and pass a dtype to compute in another one",
        )
    return "exact"


def _by_name(precision: Precision | str, dtype: torch.dtype, *, given: bool) -> Precision:
    """The precision by its name, for a dtype.

    Args:
        precision: ``"exact"``, ``"mixed"``, ``"auto"`` (mixed for a dtype of 16 bits), or all of it.
        dtype: The checkpoint's, or the one that a caller gave.
        given: Whether a caller gave it.

    Raises:
        OptionError: if the name is unknown, or dtype and precision do not go together.
    """
    if precision == "auto":
        precision = "mixed" if dtype in _HALVES else "exact"
    if precision == "exact":
        return Precision(stored=dtype)
    if precision == "mixed" and (not given or dtype in _HALVES):
        return Precision(stored=torch.float32, computed=dtype if given else faster_half(product_seconds))
    if isinstance(precision, Precision) and not given:
        return precision
    if precision == "mixed" or isinstance(precision, Precision):
        raise OptionError(
            "dtype",
            found=f"{dtype} beside precision {precision!r}",
            expected="bfloat16 or float16 beside 'mixed', and none beside a Precision",
            remedy="leave it out",
        )
    raise OptionError(
        "precision", found=repr(precision), expected="'auto', 'exact', 'mixed' or a Precision", remedy="choose one of these"
    )


def faster_half(seconds: Callable[[torch.dtype], float]) -> torch.dtype:
    """The 16-bit dtype in which products take less time; bfloat16 where they are close.

    Args:
        seconds: What a product takes in a dtype.
    """
    bfloat, half = (seconds(dtype) for dtype in _HALVES)
    return torch.float16 if half < _CLEARLY * bfloat else torch.bfloat16


@cache
def product_seconds(dtype: torch.dtype) -> float:
    """Measure a matrix product on this CPU: one without a dtype's instructions converts element by element.

    Seconds are the processor's, of one thread: on the wall, and among threads that wait for each other, whoever else is at
    work would decide.
    """
    rows, weights = torch.ones(64, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    best, threads = math.inf, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(_ROUNDS):
            began = time.thread_time()
            nn.functional.linear(rows, weights)
            best = min(best, time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return best


def autocast_dtype(modules: list[nn.Module], autocast: torch.dtype | None) -> torch.dtype | None:
    """To which dtype autocast casts a parameter that these modules have; None: not at all, or at each use anew.

    Linear layers cast weights and biases. Other modules' parameters stay as they are stored: norms and embeddings compute in
    float32, and what else is cast is cast inside the forward, with the same bits.
    """
    return autocast if modules and all(type(module) is nn.Linear for module in modules) else None
