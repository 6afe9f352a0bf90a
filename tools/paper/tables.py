"""Tables 1, 3, 6, 7 and 8 of the ZO2 paper (arXiv 2503.12668, the later version), as data in
``tables.csv``.

Measured by its authors on one NVIDIA A100 with 80 GB and an AMD Milan CPU, torch 2.4.0, CUDA 12.1;
batch 1 and 2048 tokens where a table does not say otherwise (its appendix F). Memory is in MB,
speed in tokens a second; an empty cell is the paper's '-'. Tables 3, 6 and 7 do not name their
dtype; where they repeat a setting of Table 1, the figures are those of FP32. The printed ratios of
Table 1 relate to MeZO in FP32, those of the others to MeZO in the same row.
"""

import csv
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import NamedTuple


class Variant(Enum):
    """The variants that are compared with monolithic MeZO; all but the last are columns of
    Table 3.
    """

    FULL = "in full"
    SERIAL = "without overlap"
    ALLOCATING = "without slot reuse"
    EAGER = "without deferred update"
    RESIDENT = "all blocks stay on the device"  # the engine's own speed without transfers


class Transfer(Enum):
    """The dtypes in which weights travel, both ways: the columns of Table 5."""

    STORED = "stored"
    FLOAT16 = "float16-back"
    BFLOAT16 = "bfloat16-back"
    FLOAT8 = "float8-back"


class Figures(NamedTuple):
    """The printed results of one program in one setting."""

    memory: float | None = None  # MB
    memory_ratio: float | None = None
    speed: float | None = None  # tokens a second
    speed_ratio: float | None = None


class Row(NamedTuple):
    """One setting of one table."""

    model: str  # a geometry of make_checkpoint.py
    bits: int  # bits of a weight
    batch: int  # rows
    tokens: int  # tokens of a row
    programs: dict[str, Figures]  # of MeZO and of the variants

    @property
    def monolithic(self) -> Figures:
        return self.programs["MeZO"]

    @property
    def variants(self) -> dict[Variant, Figures]:
        return {
            variant: self.programs[variant.value]
            for variant in Variant
            if variant.value in self.programs
        }


class Table(NamedTuple):
    """One table."""

    number: int
    subject: str
    rows: list[Row]


# Ratios of Table 1 that do not follow from its numbers: 1326 / 266 is 4.98, 1251 / 266 is 4.70.
MISPRINTED = [("opt-13b", 16, 1326, 5.87), ("opt-13b", 16, 1251, 5.54)]


def _read() -> Mapping[str, Table]:
    tables = {
        "main": Table(1, "memory and speed by model and dtype", []),
        "ablation": Table(3, "speed without one feature at a time", []),
        "batch": Table(6, "batch sizes", []),
        "length": Table(7, "sequence lengths", []),
        "qwen3": Table(8, "Qwen3", []),
    }
    with Path(__file__).with_name("tables.csv").open(encoding="utf-8", newline="") as file:
        for name, model, bits, batch, tokens, program, *cells in list(csv.reader(file))[1:]:
            rows, setting = tables[name].rows, (model, int(bits), int(batch), int(tokens))
            if not rows or rows[-1][:4] != setting:
                rows.append(
                    Row(*setting, {Variant.RESIDENT.value: Figures()} if name == "ablation" else {})
                )
            rows[-1].programs[program] = Figures(*(float(cell) if cell else None for cell in cells))
    return tables


TABLES = _read()


def _read_amp() -> dict[str, dict[str, dict[Transfer, float]]]:
    speeds: dict[str, dict[str, dict[Transfer, float]]] = {}
    with Path(__file__).with_name("amp.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            of_model = {transfer: float(row[transfer.name.lower()]) for transfer in Transfer}
            speeds.setdefault(row["computed"], {})[row["model"]] = of_model
    return speeds


# Table 5: tokens a second, by the dtype of computation and by model
AMP = _read_amp()
