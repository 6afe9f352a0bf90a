"""Time generation for a population against transformers' own generate on the unperturbed model, at the same batch.

    python tools/bench_rewards.py --model smollm2 --output rewards.json
    python tools/bench_rewards.py --model smollm2-nf4 --memory 1GB --prompts 8 --ours-only

Both write the same number of tokens after random prompts. Ours generates at all evaluations of a step, with
low-rank directions, and the other side generates as many rows with the weights as they are. They alternate. ``--ours-only``
leaves out the other side, for models that it cannot open; with ``--memory`` blocks are streamed from disk. Prints a table
and JSON: medians and ranges, tokens a second and a sweep.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch
from bench_overlap import keep, machine, spread
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.tasks.generation import Generation
from zo2core import Distribution, EvolutionStrategies, LowRankPerturbation, MemoryPolicy, PhiloxNoise, ZOEngine


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
    parser.add_argument("--activations", default="6GiB")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    model = open_checkpoint(options.model, dtype=options.dtype)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(10, vocabulary, (options.prompts, options.prompt_tokens), generator=generator)
    rows = options.prompts * options.directions
    estimator = EvolutionStrategies(lr=1e-3, zo_eps=1e-3, q=options.directions // 2, perturb_in_place=False)
    measured: dict[str, list[float]] = {"population": [], "transformers": []}
    with ZOEngine(
        model,
        estimator,
        noise=PhiloxNoise(Distribution.RADEMACHER),
        perturbation=LowRankPerturbation(rank=options.rank),
        memory=MemoryPolicy(host=options.memory, activations=options.activations),
    ) as engine:
        whole: Any = None
        if not options.ours_only:
            whole = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
        stacked = ids.repeat(options.directions, 1)
        for number in range(options.rounds + 1):  # the first one warms up
            evaluations = engine.ask()
            began = time.perf_counter()
            made = Generation(engine, model, max_new_tokens=options.tokens, evaluations=evaluations).continuations(
                ids.tolist()
            )
            seconds = {"population": time.perf_counter() - began}
            assert all(len(tokens) == options.tokens for of_evaluation in made for tokens in of_evaluation)
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
                for name, value in seconds.items():
                    measured[name].append(value)
            print(
                number,
                {name: f"{rows * options.tokens / value:.1f} tokens/s" for name, value in seconds.items()},
                flush=True,
            )
    ours, theirs = measured["population"], measured["transformers"]
    result = {
        "machine": machine(),
        **{key: str(value) for key, value in vars(options).items()},
        "tokens_per_sweep": rows,
        "seconds_per_sweep": spread([value / options.tokens for value in ours]),
        "tokens_per_second": {
            name: spread([rows * options.tokens / value for value in values]) for name, values in measured.items() if values
        },
        "ratio": spread([other / own for own, other in zip(ours, theirs, strict=True)]) if theirs else None,
    }
    keep(result, options.output)


if __name__ == "__main__":
    main()
