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
            raise _refused("stored", str(self.stored), f"one of {', '.join(map(str, _STORED))}")
        transferred = tuple(_TRANSFER_DTYPES.values())
        for name, dtype, dtypes in (("computed", self.autocast, _HALVES), ("transfer_dtype", self.carried, transferred)):
            if dtype is not None and not (self.stored is torch.float32 and dtype in dtypes):
                expected = f"{self.stored}, or one of {', '.join(map(str, dtypes))} where torch.float32 is stored"
                raise _refused(name, f"{dtype} where {self.stored} is stored", expected)
        if self.transfer_back and self.carried is None:
            raise _refused("transfer_back", "True without a transfer dtype", "a transfer dtype other than the stored one")

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of ``torch.autocast`` in the forward; None disables it."""
        return None if self.computed in (None, self.stored) else self.computed

    @property
    def carried(self) -> torch.dtype | None:
        """The dtype of transfer, if it is another one than the stored one."""
        return None if self.transfer_dtype in (None, self.stored) else self.transfer_dtype


def _refused(field: str, found: str, expected: str) -> OptionError:
    remedy = "pass such a value, or store torch.float32 and leave this one out"
    return OptionError(f"precision.{field}", found=found, expected=expected, remedy=remedy)


def choose_precision(
    precision: Precision | str, dtype: torch.dtype, *, is_given: bool, transfer_dtype: str = "stored"
) -> Precision:
    """Make a ``Precision`` from the options of ``open_checkpoint``."""
    name = precision
    if name == "auto":
        name = "mixed" if dtype in _HALVES else "exact"
    if isinstance(name, Precision) and not is_given:
        chosen = name
    elif name == "exact":
        chosen = Precision(stored=dtype)
    elif name == "mixed" and (not is_given or dtype in _HALVES):
        chosen = Precision(stored=torch.float32, computed=dtype if is_given else faster_half(product_seconds))
    elif name == "mixed" or isinstance(name, Precision):
        found, expected = f"{dtype} with precision {name!r}", "bfloat16 or float16 with 'mixed', and none with a Precision"
        raise OptionError("dtype", found=found, expected=expected, remedy="leave it out")
    else:
        expected = "'auto', 'exact', 'mixed' or a Precision"
        raise OptionError("precision", found=repr(name), expected=expected, remedy="pass one of these")
    if transfer_dtype == "stored":
        return chosen
    if transfer_dtype not in TRANSFER_DTYPES or isinstance(precision, Precision):
        expected = f"one of {', '.join(TRANSFER_DTYPES)}, and none with a Precision"
        raise OptionError("transfer_dtype", found=repr(transfer_dtype), expected=expected, remedy="pass one of these")
    carried = _TRANSFER_DTYPES[transfer_dtype.removesuffix(_BACK)]
    return replace(chosen, transfer_dtype=carried, transfer_back=transfer_dtype.endswith(_BACK))


def exact_where_encoded(precision: Precision | str, transfer_dtype: str) -> Precision | str:
    """Return "exact", the only precision of checkpoints with matrices in 8 or 4 bits."""
    given = {"transfer_dtype": (transfer_dtype, "stored"), "precision": (precision, "auto", "exact")}
    for option, (value, *allowed) in given.items():
        if value not in allowed:
            raise OptionError(
                option,
                found=f"{value} for quantised weights",
                expected="exact precision and the stored transfer dtype",
                remedy="leave it out, and pass a dtype to compute in another one",
            )
    return "exact"


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
