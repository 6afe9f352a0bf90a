"""Time generation for a population against transformers' own generate on the unperturbed model, at the same batch.

    python tools/bench_rewards.py --model smollm2 --output rewards.json

    python tools/make_checkpoint.py opt-1.3b opt-1.3b --dtype bfloat16
    zo2 convert --model opt-1.3b --output opt-1.3b-nf4 --quantize nf4
    python tools/bench_rewards.py --model opt-1.3b-nf4 --memory 2GiB --prompts 8 --directions 8 --ours-only

Both write the same number of tokens after random prompts. Ours generates at all evaluations of a step, with
low-rank directions, and the other side generates as many rows with the weights as they are. They alternate. ``--ours-only``
leaves out the other side, for models that it cannot open; with ``--memory`` blocks are streamed from disk. Prints
JSON: medians and ranges of tokens a second, and of seconds, tokens and bytes read from disk a sweep; and the peak memory of
the process, of both sides.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import keep, machine, spread
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.tasks.generation import Generation, plan_generation
from zo2adapters.trainers.allocator import peak_memory
from zo2core import Distribution, Engine, EvolutionStrategies, LowRankPerturbation, MemoryPolicy, PhiloxNoise, ZerothOrder


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
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
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    model = open_checkpoint(options.model, dtype=options.dtype)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(10, vocabulary, (options.prompts, options.prompt_tokens), generator=generator)
    rows = options.prompts * options.directions
    estimator = EvolutionStrategies(lr=1e-3, zo_eps=1e-3, q=options.directions // 2, perturb_in_place=False)
    whole_plan = plan_generation(
        model.config,
        evaluations=options.directions,
        rows=options.prompts,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.tokens,
        allowed=None,
    )
    activations = options.activations or whole_plan.nbytes
    measured: dict[str, list[float]] = {"population": [], "transformers": []}
    sweeps, read_bytes = [], []
    with Engine(
        model,
        ZerothOrder(
            estimator, noise=PhiloxNoise(Distribution.RADEMACHER), perturbation=LowRankPerturbation(rank=options.rank)
        ),
        memory=MemoryPolicy(host=options.memory, activations=activations),
    ) as engine:
        whole: Any = None
        if not options.ours_only:
            whole = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
        stacked = ids.repeat(options.directions, 1)
        for number in range(options.rounds + 1):  # the first one warms up
            generation = Generation(
                engine,
                model,
                max_new_tokens=options.tokens,
                evaluations=engine.ask(),
                allowed=engine.activation_bytes,
            )
            read, began = psutil.Process().io_counters().read_bytes, time.perf_counter()
            tokens = [len(made) for made in generation.sweeps(ids.tolist())]
            seconds = {"population": time.perf_counter() - began}
            bytes_read = psutil.Process().io_counters().read_bytes - read
            assert sum(tokens) == rows * options.tokens
            if whole is not None:
                gc.collect()
                began = time.perf_counter()
                whole.generate(
                    stacked,
                    attention_mask=torch.ones_like(stacked),
                    max_new_tokens=options.tokens,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
                seconds["transformers"] = time.perf_counter() - began
            if number:
                sweeps.append(len(tokens))
                read_bytes.append(bytes_read)
                for name, value in seconds.items():
                    measured[name].append(value)
            print(
                number,
                {name: f"{rows * options.tokens / value:.1f} tokens/s" for name, value in seconds.items()},
                flush=True,
            )
        plan = engine.host_plan
    ours, theirs = measured["population"], measured["transformers"]
    of_sweep = {
        "seconds": [value / count for value, count in zip(ours, sweeps, strict=True)],
        "tokens": [rows * options.tokens / count for count in sweeps],
        "bytes_read": [value / count for value, count in zip(read_bytes, sweeps, strict=True)],
    }
    result = {
        "machine": machine(),
        **{key: str(value) for key, value in vars(options).items()},
        "activations": activations,
        "buckets": None if plan is None else plan.buckets,  # None: all blocks in memory
        "weight_bytes": sum(layout.nbytes for layout in model.layouts),
        "sweep": {name: spread(values) for name, values in of_sweep.items()},
        "peak_bytes": peak_memory(),
        "tokens_per_second": {
            name: spread([rows * options.tokens / value for value in values]) for name, values in measured.items() if values
        },
        "ratio": spread([other / own for own, other in zip(ours, theirs, strict=True)]) if theirs else None,
    }
    keep(result, options.output)


if __name__ == "__main__":
    main()
