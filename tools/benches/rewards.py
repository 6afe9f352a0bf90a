"""Time generation for a population against transformers' own generate on the unperturbed model, at the same batch.

    python tools/bench.py rewards smollm2

    python tools/make_checkpoint.py opt-1.3b opt-1.3b --dtype bfloat16
    zo2 convert --model opt-1.3b --output opt-1.3b-nf4 --quantize nf4
    python tools/bench.py rewards opt-1.3b-nf4 --memory 2GiB --prompts 8 --directions 8 --ours-only

Both write the same number of tokens after random prompts. The population generates at all evaluations of a step, with
low-rank directions; transformers generates as many rows with the weights as they are. ``--ours-only`` leaves it out, for
models that it cannot open; with ``--memory`` blocks are streamed from disk. The peak memory is that of the process, of both
sides.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import alternate, spread, times_faster
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.tasks.generation import Generation, plan_generation
from zo2adapters.trainers.process import peak_memory
from zo2core import Distribution, Engine, EvolutionStrategies, LowRankPerturbation, MemoryPolicy, PhiloxNoise, ZerothOrder


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument("--directions", type=int, default=16, help="evaluations of a step, in antithetic pairs")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a completion")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--activations", help="memory of keys, values and activations; by default that of all rows")
    parser.add_argument("--ours-only", action="store_true")


def run(options: argparse.Namespace) -> dict[str, Any]:
    model = open_checkpoint(options.model, dtype=options.dtype)
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, vocabulary, (options.prompts, options.prompt_tokens), generator=generator)
    stacked, written = ids.repeat(options.directions, 1), options.prompts * options.directions * options.tokens
    needed = plan_generation(
        model.config,
        evaluations=options.directions,
        rows=options.prompts,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.tokens,
        allowed=None,
    )
    memory = MemoryPolicy(host=options.memory, activations=options.activations or needed.nbytes)
    estimator = EvolutionStrategies(lr=1e-3, zo_eps=1e-3, q=options.directions // 2, perturb_in_place=False)
    low_rank = LowRankPerturbation(rank=options.rank)
    method = ZerothOrder(estimator, noise=PhiloxNoise(Distribution.RADEMACHER), perturbation=low_rank)
    with Engine(model, method, memory=memory) as engine:

        def population() -> tuple[int, int]:
            evaluations, read = engine.ask(), psutil.Process().io_counters().read_bytes
            allowed = engine.activation_bytes
            made = Generation(engine, model, max_new_tokens=options.tokens, evaluations=evaluations, allowed=allowed)
            tokens = [len(sweep) for sweep in made.sweeps(ids.tolist())]
            assert sum(tokens) == written
            return len(tokens), psutil.Process().io_counters().read_bytes - read

        sides: dict[str, Callable[[], Any]] = {"population": population}
        if not options.ours_only:
            whole: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
            given: Any = {"max_new_tokens": options.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            mask = torch.ones_like(stacked)
            sides["transformers"] = lambda: (gc.collect(), whole.generate(stacked, attention_mask=mask, **given))
        measured = alternate(sides, options.rounds, warm_up=1)
        plan = engine.host_plan
    ours = measured["population"]
    pairs = list(zip(ours.seconds, ours.results, strict=True))
    return {
        "buckets": None if plan is None else plan.buckets,  # None: all blocks in memory
        "weights_bytes": sum(layout.nbytes for layout in model.layouts),
        "peak_bytes": peak_memory(),
        "tokens a second": {name: spread([written / one for one in side.seconds]) for name, side in measured.items()},
        "population to transformers": None if options.ours_only else times_faster(measured, "population", "transformers"),
        "sweep": {
            "seconds": spread([seconds / sweeps for seconds, (sweeps, _) in pairs]),
            "tokens": spread([written / sweeps for _, (sweeps, _) in pairs]),
            "read_bytes": spread([read / sweeps for _, (sweeps, read) in pairs]),
        },
    }
