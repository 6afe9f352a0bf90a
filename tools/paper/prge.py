"""Measure the tables of the P-RGE paper (arXiv 2409.15520): time and memory of parallel queries and signs.

    python tools/bench.py prge --queries 1 4 16 --effective 16 --tokens 32 64 128
    python tools/bench.py prge --queries 1 --effective 1 --tokens 32 64 128 --bases bfloat16 int8 nf4

A step with q queries on a batch of B rows has 2 q evaluations; its effective batch size E = q B is constant. LoRA-FA trains
the matrices B of all query and value projections, along the same directions in all variants. The paper's variants differ in
their forwards of the whole model:

    in turn   2 q forwards of B rows: each query's two signs, one after the other
    inner     q forwards of 2 B rows: both signs of a query together
    outer     2 forwards of q B rows: all queries together, the signs one after the other
    both      one forward of 2 q B rows

The engine's ``stack`` differs from these: a step visits each block once, and ``stack`` evaluations run together at that
visit, in the order + - + -. The default, all of them, is *both*; 1 is *one visit*: the 2 q forwards of B rows alternate
block by block, so that a block is read and decoded once for all. For the paper's variants a step starts with ``ask``, runs a
sweep for each of the forwards above, and ends with ``tell``. Two variants use torch alone: *plain*, the paper's 'vanilla',
is two forwards of peft's model with B perturbed in place, and *first order* is its gradient and SGD.

All variants alternate with all numbers of queries; those that are the same at q = 1 run once. A row has seconds, the ratios
of consecutive steps, the peak bytes of a step's operations without weights and what stays between steps; and for this model
and the paper's two there are the bytes of the weights.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import make_checkpoint
from measuring import alternate, lora, lora_fa, peak_of_step, ratio, spread
from synthetic import scaled
from transformers import LlamaConfig, PretrainedConfig

from paper.zo2 import batch_of
from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.architecture import ARCHITECTURES, segment_layouts
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.models.quantizer import quantize
from zo2adapters.models.skeleton import build_skeleton
from zo2core import Distribution, Engine, LowRankPerturbation, MultiQueryRGE, PhiloxNoise, ZerothOrder
from zo2core.encodings import Encoding, Int8Rows, NF4Blocks
from zo2core.types import Batch

RANK = 16
LR, ZO_EPS = 1e-6, 1e-2
ENCODINGS: Mapping[str, Encoding] = {"int8": Int8Rows(), "nf4": NF4Blocks()}
AGREE = {"float32": 1e-5}  # relative tolerance of an evaluation's losses, by dtype; 2e-2 for other dtypes
PAPER_GIB = {"TinyLlama-1.1B": (4.10, 2.05, 1.15, 0.70), "Llama2-7B": (25.10, 12.56, 6.52, 3.50)}  # Table 9 of the paper


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=int, default=4, help="TinyLlama's width, heads and vocabulary are divided by this")
    parser.add_argument("--layers", type=int, default=8, help="number of TinyLlama's 22 layers to keep")
    parser.add_argument("--bases", nargs="+", choices=["float32", "bfloat16", "float16", *ENCODINGS], default=["bfloat16"])
    of_queries = "numbers of queries; all are compared with the first"
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 4, 16], help=of_queries)
    parser.add_argument("--effective", type=int, default=16, help="effective batch size: rows times queries")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--steps", type=int, default=5)


def run(options: argparse.Namespace) -> dict[str, Any]:
    config = scaled(paper_configs()["TinyLlama-1.1B"], options.scale, max(options.tokens))
    config.num_hidden_layers = options.layers
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        sizes = write_bases(config, Path(folder), options.bases)
        for tokens in options.tokens:
            for base in options.bases:
                found = bench(Path(folder, base), options.queries, options.effective, tokens, options.steps)
                measured[f"{base}, {tokens} tokens"] = found
    bases = ("float32", "bfloat16", *ENCODINGS)
    weights: dict[str, Any] = {
        name: {base: weight_bytes(of, base) / 2**30 for base in bases} for name, of in paper_configs().items()
    }
    weights |= {f"{name}, in the paper": dict(zip(bases, printed, strict=True)) for name, printed in PAPER_GIB.items()}
    return measured | {"bytes of weights": sizes, "GiB of weights": weights}


def paper_configs() -> dict[str, LlamaConfig]:
    common: dict[str, Any] = {"vocab_size": 32000, "num_attention_heads": 32}
    tiny = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4}
    large = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_key_value_heads": 32}
    return dict(zip(PAPER_GIB, (LlamaConfig(**common | shape) for shape in (tiny, large)), strict=True))


def forwards_of(queries: int) -> dict[str, list[list[int]]]:
    """The evaluations, in the order + - + -, of each forward of a variant; equal variants are listed once."""
    places = range(2 * queries)
    ways = {
        "in turn": [[place] for place in places],
        "inner": [[place, place + 1] for place in places[::2]],
        "outer": [list(places[::2]), list(places[1::2])],
        "both": [list(places)],
    }
    return {name: way for at, (name, way) in enumerate(ways.items()) if way not in list(ways.values())[:at]}


class Forwards(Engine):
    """An engine whose steps can take several sweeps, each with some of the evaluations as one batch."""

    def losses(self, batch: Batch, forwards: Sequence[Sequence[int]], *, seed: int | None = None) -> list[torch.Tensor]:
        """Start a step, which ``tell`` ends, with a sweep for the evaluations at each of these places."""
        evaluations, prepared = self.ask(seed=seed), [self._runner.model.prepared(batch)]
        losses: dict[int, torch.Tensor] = {}
        for places in forwards:
            groups = [(evaluations[place], prepared) for place in places]
            outputs = self._runner.sweep(self.version, groups, self._runner.model)
            losses.update(zip(places, (loss for [loss] in outputs), strict=True))
        return [losses[place] for place in range(len(evaluations))]


def without_engine(base: Path, batch: Batch) -> dict[str, Callable[[], object]]:
    """Steps of peft's model in torch: two forwards with their update, and a gradient."""
    mezo = lora_fa(base, lora(RANK), lr=LR, zo_eps=ZO_EPS)
    whole: Any = mezo.model
    whole.config.use_cache = False
    rule = torch.optim.SGD([parameter for parameter in whole.parameters() if parameter.requires_grad], lr=LR)

    def first_order() -> None:
        whole(**batch).loss.backward()
        rule.step()
        rule.zero_grad()

    return {"plain": partial(mezo.step, batch, 0), "first order": first_order}


def works_of(
    base: Path, opened: ExitStack, queries: Sequence[int], effective: int, tokens: int
) -> dict[tuple[int, str], Callable[[], object]]:
    """The steps of all variants, by number of queries and name."""
    works: dict[tuple[int, str], Callable[[], object]] = {}
    for q in queries:
        estimator = MultiQueryRGE(lr=LR, zo_eps=ZO_EPS, perturb_in_place=False, q=q)
        engines = []
        for stack in (None, 1):
            model = open_checkpoint(base, adapter=Adapter(config=lora(RANK), frozen=("lora_A",)))
            perturbation = LowRankPerturbation(rank=RANK, period=10**6, stack=stack)
            noise = PhiloxNoise(Distribution.RADEMACHER)
            engine = Forwards(model, ZerothOrder(estimator, noise=noise, perturbation=perturbation))
            engines.append(opened.enter_context(engine))
        batch = batch_of(model.config.vocab_size, effective // q, tokens, torch.device("cpu"))
        in_sweeps, in_a_visit = engines
        agree(in_sweeps, batch, q, rel_tol=AGREE.get(base.name, 2e-2))

        def step(engine: Forwards, batch: Batch, forwards: Sequence[Sequence[int]]) -> None:
            engine.tell(engine.losses(batch, forwards))

        works |= {(q, name): partial(step, in_sweeps, batch, way) for name, way in forwards_of(q).items()}
        works[q, "one visit"] = partial(in_a_visit.step, batch)
        if q == 1 and base.name in DTYPES:
            works |= {(q, name): work for name, work in without_engine(base, batch).items()}
    return works


def agree(engine: Forwards, batch: Batch, queries: int, *, rel_tol: float) -> None:
    """Refuse to measure variants whose losses differ."""
    found = [engine.losses(batch, way, seed=7) for way in forwards_of(queries).values()]
    for other in found:
        for one, same in zip(found[0], other, strict=True):
            assert math.isclose(one, same, rel_tol=rel_tol), f"ways differ: {found}"


def bench(base: Path, queries: Sequence[int], effective: int, tokens: int, steps: int) -> dict[str, Any]:
    """Measure all variants in turn; a row for each, by queries x rows x tokens and variant."""
    with ExitStack() as opened:
        works = works_of(base, opened, queries, effective, tokens)
        names = {key: f"{key[0]} x {effective // key[0]} x {tokens}, {key[1]}" for key in works}
        measured = alternate({names[key]: work for key, work in works.items()}, steps, warm_up=1)
        peaks = {key: peak_of_step(work) for key, work in works.items()}
    first = next(iter(works))
    rows = {}
    for key, name in names.items():
        row: dict[str, Any] = {"seconds": spread(measured[name].seconds), "peak_bytes": peaks[key]}
        for what, other in (("in turn", (key[0], "in turn")), ("the first", first), ("plain", (1, "plain"))):
            if other in names:
                row[f"times faster than {what}"] = ratio(measured[names[other]].seconds, measured[name].seconds)
                row[f"peak to {what}"] = peaks[key] / peaks[other]
        rows[name] = row
    return rows


def weight_bytes(config: PretrainedConfig, base: str) -> int:
    """The bytes that a source reads to load all weights once; only matrices of the layers are encoded."""
    dtype, encoding = DTYPES.get(base, torch.bfloat16), ENCODINGS.get(base)
    config.dtype = dtype
    layouts = segment_layouts(build_skeleton(config, dtype), ARCHITECTURES[config.model_type])
    specs = [
        replace(spec, encoding=None if layout.resident or len(spec.shape) == 1 else encoding)
        for layout in layouts
        for spec in layout.parameters
    ]
    return sum(spec.nbytes for spec in specs)


def write_bases(config: PretrainedConfig, folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Write the checkpoints of a model; return the bytes that are read from each. Encoded ones are made from bfloat16."""
    for name in sorted({"bfloat16", *names}, key=lambda name: name in ENCODINGS):
        if name in DTYPES:
            make_checkpoint(config, folder / name, dtype=DTYPES[name])
        else:
            quantize(folder / "bfloat16", folder / name, name)
    sizes = {}
    for name in names:
        specs = [spec for layout in open_checkpoint(folder / name).layouts for spec in layout.parameters]
        sizes[name] = sum(spec.nbytes for spec in specs)
        assert sizes[name] == weight_bytes(config, name), f"another size than what was computed for {name}"
    return sizes
