"""Tables 1, 3, 6, 7 and 8 of the ZO2 paper (arXiv 2503.12668, the later version), as data.

Measured by its authors on one NVIDIA A100 with 80 GB and an AMD Milan CPU, torch 2.4.0, CUDA 12.1; batch 1 and 2048 tokens
where a table does not say otherwise (its appendix F). Memory is in MB, speed in tokens a second; None is the paper's '-'.
Tables 3, 6 and 7 do not name their dtype; where they repeat a setting of Table 1, the figures are those of FP32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

BATCH, TOKENS = 1, 2048  # appendix F


class Variant(Enum):
    """The variants that are compared with monolithic MeZO; all but the last are columns of Table 3."""

    FULL = "in full"
    SERIAL = "without overlap"
    ALLOCATING = "without slot reuse"
    EAGER = "without deferred update"
    RESIDENT = "all blocks stay on the device"


class Printed(NamedTuple):
    """One cell of a table."""

    value: int | None = None
    ratio: float | None = None  # ratio to the row's base, which the paper prints in parentheses


class Figures(NamedTuple):
    """The printed results of one program in one setting."""

    memory: Printed = Printed()  # MB
    speed: Printed = Printed()  # tokens a second


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of one table."""

    model: str  # a geometry of make_checkpoint.py
    bits: int  # bits of a weight
    batch: int = BATCH  # rows
    tokens: int = TOKENS  # tokens of a row
    monolithic: Figures
    zo2: Mapping[Variant, Figures]
    base: Figures = field(repr=False)  # denominators of the printed ratios


class Table(NamedTuple):
    """One table."""

    number: int
    subject: str
    rows: tuple[Row, ...]


# Ratios of Table 1 that do not follow from its numbers: 1326 / 266 is 4.98, 1251 / 266 is 4.70.
MISPRINTED = [("opt-13b", 16, Printed(1326, 5.87)), ("opt-13b", 16, Printed(1251, 5.54))]

_NONE = Printed()
_SIZES = ("opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b")


def _main() -> Iterator[Row]:
    """Both dtypes' printed ratios relate to MeZO in FP32."""
    p = Printed
    memory = {
        "opt-1.3b": (p(8898), p(5098, 0.57), p(5814, 0.65), p(3750, 0.42)),
        "opt-2.7b": (p(14514), p(5930, 0.41), p(9054, 0.62), p(4142, 0.29)),
        "opt-6.7b": (p(32930), p(8420, 0.26), p(16586, 0.50), p(4992, 0.15)),
        "opt-13b": (p(58762), p(10736, 0.18), p(29690, 0.51), p(6180, 0.11)),
        "opt-30b": (_NONE, p(15981), p(63896), p(8856)),
        "opt-66b": (_NONE, p(22295), _NONE, p(12071)),
        "opt-175b": (_NONE, p(34015), _NONE, p(18039)),
    }
    speed = {
        "opt-1.3b": (p(1998), p(1955, 0.97), p(6629, 3.32), p(6448, 3.23)),
        "opt-2.7b": (p(1104), p(1086, 0.98), p(4229, 3.83), p(4220, 3.82)),
        "opt-6.7b": (p(492), p(485, 0.98), p(2349, 4.77), p(2270, 4.61)),
        "opt-13b": (p(266), p(259, 0.97), p(1326, 5.87), p(1251, 5.54)),
        "opt-30b": (_NONE, p(122), p(641), p(514)),
        "opt-66b": (_NONE, p(40), _NONE, p(273)),
        "opt-175b": (_NONE, p(14), _NONE, p(37)),
    }
    for model in memory:
        mezo32, zo32, mezo16, zo16 = (Figures(*cells) for cells in zip(memory[model], speed[model], strict=True))
        yield Row(model=model, bits=32, monolithic=mezo32, zo2={Variant.FULL: zo32}, base=mezo32)
        yield Row(model=model, bits=16, monolithic=mezo16, zo2={Variant.FULL: zo16}, base=mezo32)


def _ablation() -> Iterator[Row]:
    p = Printed
    speed = {  # MeZO, no scheduler overlap, no reusable memory, no efficient update, ZO2
        "opt-1.3b": (p(1998), p(1109, 0.56), p(735, 0.37), p(1567, 0.78), p(1955, 0.97)),
        "opt-2.7b": (p(1104), p(573, 0.52), p(422, 0.38), p(849, 0.77), p(1086, 0.98)),
        "opt-6.7b": (p(492), p(225, 0.46), p(184, 0.37), p(373, 0.76), p(485, 0.98)),
        "opt-13b": (p(266), p(105, 0.39), p(103, 0.39), p(198, 0.74), p(259, 0.97)),
        "opt-30b": (_NONE, p(35), p(46), p(81), p(122)),
        "opt-66b": (_NONE, p(22), p(15), p(36), p(40)),
        "opt-175b": (_NONE, p(8), p(5), p(13), p(14)),
    }
    for model, (mezo, serial, allocating, eager, full) in speed.items():
        columns = {
            Variant.FULL: full,
            Variant.SERIAL: serial,
            Variant.ALLOCATING: allocating,
            Variant.EAGER: eager,
            Variant.RESIDENT: _NONE,  # not in the paper: the engine's own speed without transfers
        }
        base = Figures(speed=mezo)
        zo2 = {variant: Figures(speed=cell) for variant, cell in columns.items()}
        yield Row(model=model, bits=32, monolithic=base, zo2=zo2, base=base)


_Cells = tuple[int | None, int, float | None, int | None, int, float | None]  # memory: MeZO, ZO2, ratio; speed: the same


def _row(model: str, bits: int, batch: int, tokens: int, cells: _Cells) -> Row:
    mezo = Figures(Printed(cells[0]), Printed(cells[3]))
    zo2 = Figures(Printed(cells[1], cells[2]), Printed(cells[4], cells[5]))
    return Row(model=model, bits=bits, batch=batch, tokens=tokens, monolithic=mezo, zo2={Variant.FULL: zo2}, base=mezo)


def _batch() -> Iterator[Row]:
    cells: dict[int, tuple[_Cells, ...]] = {
        1: (
            (8898, 5098, 0.57, 1998, 1955, 0.97),
            (14514, 5930, 0.41, 1104, 1086, 0.98),
            (32930, 8420, 0.26, 492, 485, 0.98),
            (58762, 10736, 0.18, 266, 259, 0.97),
        ),
        2: (
            (11733, 8481, 0.72, 2126, 2105, 0.99),
            (18373, 9312, 0.50, 1204, 1193, 0.99),
            (34943, 9683, 0.27, 561, 556, 0.99),
            (61919, 12315, 0.19, 297, 294, 0.99),
        ),
        4: (
            (16067, 12887, 0.80, 2309, 2296, 0.99),
            (23731, 14211, 0.59, 1268, 1262, 0.99),
            (43683, 17233, 0.39, 589, 587, 0.99),
            (72159, 19591, 0.27, 312, 311, 0.99),
        ),
        8: (
            (27529, 22775, 0.82, 2358, 2348, 0.99),
            (37113, 23639, 0.63, 1297, 1294, 0.99),
            (57541, 26207, 0.45, 604, 602, 0.99),
            (None, 31399, None, None, 320, None),
        ),
    }
    for batch, rows in cells.items():
        for model, row in zip(_SIZES, rows, strict=True):
            yield _row(model, 32, batch, TOKENS, row)


def _length() -> Iterator[Row]:
    cells: dict[int, tuple[_Cells, ...]] = {
        1024: (
            (8665, 4471, 0.51, 1901, 1830, 0.96),
            (14465, 5389, 0.37, 1051, 1013, 0.96),
            (31379, 8405, 0.26, 439, 426, 0.97),
            (56183, 10717, 0.19, 244, 243, 0.99),
        ),
        2048: (
            (8898, 5098, 0.57, 1998, 1955, 0.97),
            (14514, 5930, 0.41, 1104, 1086, 0.98),
            (32930, 8420, 0.26, 492, 485, 0.98),
            (58762, 10736, 0.18, 266, 259, 0.97),
        ),
        4096: (
            (11379, 7581, 0.67, 1707, 1692, 0.99),
            (19655, 9023, 0.45, 1008, 1001, 0.99),
            (38047, 11763, 0.30, 509, 505, 0.99),
            (64519, 14915, 0.23, 275, 272, 0.99),
        ),
        8192: (
            (32499, 20507, 0.63, 1282, 1279, 0.99),
            (38127, 21351, 0.55, 786, 784, 0.99),
            (54495, 24115, 0.44, 446, 445, 0.99),
            (None, 30355, None, None, 246, None),
        ),
    }
    for tokens, rows in cells.items():
        for model, row in zip(_SIZES, rows, strict=True):
            yield _row(model, 32, BATCH, tokens, row)


def _qwen3() -> Iterator[Row]:
    cells: dict[str, _Cells] = {
        "qwen3-1.7b": (9329, 8649, 0.92, 8320, 6873, 0.82),
        "qwen3-4b": (14357, 9287, 0.64, 3955, 3600, 0.91),
        "qwen3-8b": (22995, 10403, 0.45, 2391, 1827, 0.76),
        "qwen3-14b": (36877, 13033, 0.35, 1421, 1114, 0.78),
        "qwen3-32b": (71195, 13691, 0.19, 668, 500, 0.74),
    }
    for model, row in cells.items():
        yield _row(model, 16, BATCH, TOKENS, row)


TABLES: Mapping[str, Table] = {
    "main": Table(1, "memory and speed by model and dtype", tuple(_main())),
    "ablation": Table(3, "speed without one feature at a time", tuple(_ablation())),
    "batch": Table(6, "batch sizes", tuple(_batch())),
    "length": Table(7, "sequence lengths", tuple(_length())),
    "qwen3": Table(8, "Qwen3", tuple(_qwen3())),
}
