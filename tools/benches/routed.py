"""Generate with a mixture: experts read when tokens are routed to them, against all experts read and decoded.

    python tools/make_checkpoint.py qwen3-30b-a3b qwen3-30b-a3b-nf4 --dtype bfloat16 --sparse --nf4
    python tools/bench.py routed --model qwen3-30b-a3b-nf4 --memory 6GiB

Each token's experts are drawn evenly in each block, the same on both sides, since the weights of a sparse file would always
choose the same ones. The first token passes the prompt, and does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import spread

from zo2adapters import open_checkpoint
from zo2adapters.tasks.generation import generate
from zo2core import Engine, MemoryPolicy

ROOM = 256 << 20  # bytes of activations


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--memory", default="6GiB")
    parser.add_argument("--prompt-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--all-tokens", type=int, default=4, help="tokens of the side that reads all experts")


def run(options: argparse.Namespace) -> dict[str, Any]:
    prompt = torch.randint(3, 500, (options.prompt_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    routed, tokens = side(options, prompt, options.tokens, routed=True)
    every, expected = side(options, prompt, options.all_tokens, routed=False)
    both = min(len(tokens), len(expected))
    if tokens[:both] != expected[:both]:
        raise SystemExit("the two sides generate different tokens")
    faster = every["a token, seconds"]["median"] / routed["a token, seconds"]["median"]
    return {"routed": routed, "all": every, "times faster": faster}


def drawn(block: int) -> Callable[[torch.nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """A hook that draws the experts of each token."""
    generator = torch.Generator().manual_seed(block)

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, chosen, *others = arguments
        evenly = torch.ones(len(chosen), int(module.num_experts))  # type: ignore[arg-type]
        return hidden, torch.multinomial(evenly, chosen.shape[1], generator=generator), *others

    return hook


def side(options: argparse.Namespace, prompt: list[int], count: int, *, routed: bool) -> tuple[dict[str, Any], list[int]]:
    """What tokens take, and the tokens."""
    model = open_checkpoint(options.model)
    stacks = [spec for layout in model.layouts for spec in layout.parameters if len(spec.shape) == 3]
    for number, module in enumerate(dict.fromkeys(model.places_of(spec.name)[0][1] for spec in stacks)):
        module.register_forward_pre_hook(drawn(number))
    experts = model.route(tokens=1) if routed else None
    room = ROOM + (0 if experts is None else experts.buffer_bytes)
    seconds: list[float] = []
    read: list[int] = []
    made: list[int] = []
    with Engine(model, memory=MemoryPolicy(host=options.memory, activations=room)) as engine:
        if experts is not None and engine.host_plan is not None:
            experts.capacity = max(engine.host_plan.spare, 0)
        began = time.perf_counter()
        for (token,) in generate(engine, model, [prompt], max_new_tokens=count):
            assert token is not None, "no token ends a row"
            seconds.append(time.perf_counter() - began)
            read.append(0 if experts is None else experts.read_bytes - sum(read))
            made.append(token)
            began = time.perf_counter()
    found: dict[str, Any] = {
        "a token, seconds": spread(seconds[1:]),
        "bytes of all experts": sum(spec.nbytes for spec in stacks),
    }
    if experts is not None:
        found |= {"expert bytes a token": statistics.median(read[1:]), "kept, bytes": experts.capacity}
    return found, made
