"""Generation, by a population against transformers and by a mixture with experts that are read when
tokens need them.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
from measuring import alternate, spread, times_faster
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.tasks.generation import Generation, generate, plan_generation
from zo2core import (
    Distribution,
    Engine,
    EvolutionStrategies,
    LowRankPerturbation,
    MemoryPolicy,
    PhiloxNoise,
    ZerothOrder,
)
from zo2core.io.process_memory import peak_memory

ROOM = 256 << 20  # bytes of activations


def rewards(
    model: Path,
    *,
    dtype: str = "auto",
    prompts: int = 64,
    prompt_tokens: int = 24,
    directions: Annotated[int, "evaluations of a step, in antithetic pairs"] = 16,
    tokens: Annotated[int, "tokens of a completion"] = 16,
    rank: int = 8,
    rounds: int = 3,
    memory: str = "auto",
    activations: Annotated[
        str | None, "memory of keys, values and activations; by default that of all rows"
    ] = None,
    ours_only: bool = False,
) -> dict[str, Any]:
    """Time generation for a population against transformers' own generate on the unperturbed model,
    at the same batch.

        python tools/bench.py rewards smollm2

        python tools/make_checkpoint.py opt-1.3b opt-1.3b --dtype bfloat16
        zo2 convert --model opt-1.3b --output opt-1.3b-nf4 --quantize nf4
        python tools/bench.py rewards opt-1.3b-nf4 --memory 2GiB --prompts 8 --directions 8
        --ours-only

    Both write the same number of tokens after random prompts. The population generates at all
    evaluations of a step, with low-rank directions; transformers generates as many rows with the
    weights as they are. ``--ours-only`` leaves it out, for models that it cannot open; with
    ``--memory`` blocks are streamed from disk. The peak memory is that of the process, of both
    sides.
    """
    opened = open_checkpoint(model, dtype=dtype)
    vocabulary = opened.config.get_text_config().vocab_size
    ids = torch.randint(
        10, vocabulary, (prompts, prompt_tokens), generator=torch.Generator().manual_seed(0)
    )
    stacked, written = ids.repeat(directions, 1), prompts * directions * tokens
    sizes: dict[str, Any] = {
        "rows": prompts,
        "prompt_tokens": prompt_tokens,
        "new_tokens": tokens,
        "allowed": None,
    }
    needed = plan_generation(opened.config, evaluations=directions, **sizes)
    estimator = EvolutionStrategies(lr=1e-3, zo_eps=1e-3, q=directions // 2, perturb_in_place=False)
    low_rank = LowRankPerturbation(rank=rank)
    method = ZerothOrder(
        estimator, noise=PhiloxNoise(Distribution.RADEMACHER), perturbation=low_rank
    )
    with Engine(
        opened, method, memory=MemoryPolicy(host=memory, activations=activations or needed.nbytes)
    ) as engine:

        def population() -> tuple[int, int]:
            evaluations, read = engine.ask(), psutil.Process().io_counters().read_bytes
            allowed = engine.activation_bytes
            made = Generation(
                engine, opened, max_new_tokens=tokens, evaluations=evaluations, allowed=allowed
            )
            of_sweeps = [len(sweep) for sweep in made.sweeps(ids.tolist())]
            assert sum(of_sweeps) == written
            return len(of_sweeps), psutil.Process().io_counters().read_bytes - read

        sides: dict[str, Callable[[], Any]] = {"population": population}
        if not ours_only:
            whole: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
            given: Any = {
                "max_new_tokens": tokens,
                "do_sample": False,
                "eos_token_id": None,
                "pad_token_id": 0,
            }
            mask = torch.ones_like(stacked)
            sides["transformers"] = lambda: (
                gc.collect(),
                whole.generate(stacked, attention_mask=mask, **given),
            )
        measured = alternate(sides, rounds, warm_up=1)
        plan = engine.host_plan
    ours = measured["population"]
    pairs = list(zip(ours.seconds, ours.results, strict=True))
    return {
        "buckets": None if plan is None else plan.buckets,  # None: all blocks in memory
        "weights_bytes": sum(layout.nbytes for layout in opened.layouts),
        "peak_bytes": peak_memory(),
        "tokens a second": {
            name: spread([written / one for one in side.seconds]) for name, side in measured.items()
        },
        "population to transformers": None
        if ours_only
        else times_faster(measured, "population", "transformers"),
        "sweep": {
            "seconds": spread([seconds / sweeps for seconds, (sweeps, _) in pairs]),
            "tokens": spread([written / sweeps for _, (sweeps, _) in pairs]),
            "read_bytes": spread([read / sweeps for _, (sweeps, read) in pairs]),
        },
    }


def routed(
    *,
    model: Path = Path("qwen3-30b-a3b-nf4"),
    memory: str = "6GiB",
    prompt_tokens: int = 4,
    tokens: int = 12,
    all_tokens: Annotated[int, "tokens of the side that reads all experts"] = 4,
) -> dict[str, Any]:
    """Generate with a mixture: experts read when tokens are routed to them, against all experts
    read and decoded.

        python tools/make_checkpoint.py qwen3-30b-a3b qwen3-30b-a3b-nf4 --dtype bfloat16 --sparse
        --nf4 python tools/bench.py routed --model qwen3-30b-a3b-nf4 --memory 6GiB

    Each token's experts are drawn evenly in each block, the same on both sides, since the weights
    of a sparse file would always choose the same ones. The first token passes the prompt, and does
    not count.
    """
    prompt = torch.randint(
        3, 500, (prompt_tokens,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    ours, made = generated(model, memory, prompt, tokens, routes=True)
    every, expected = generated(model, memory, prompt, all_tokens, routes=False)
    if any(one != other for one, other in zip(made, expected, strict=False)):
        raise SystemExit("the two sides generate different tokens")
    faster = every["a token, seconds"]["median"] / ours["a token, seconds"]["median"]
    return {"routed": ours, "all": every, "times faster": faster}


def generated(
    checkpoint: Path, memory: str, prompt: list[int], count: int, *, routes: bool
) -> tuple[dict[str, Any], list[int | None]]:
    """What tokens take, and the tokens."""
    model = open_checkpoint(checkpoint)
    stacks = [
        spec for layout in model.layouts for spec in layout.parameters if len(spec.shape) == 3
    ]
    for number, module in enumerate(
        dict.fromkeys(model.places_of(spec.name)[0][1] for spec in stacks)
    ):
        module.register_forward_pre_hook(drawn(number))
    experts = model.route(tokens=1) if routes else None
    room, seconds, read, made = ROOM + (experts.buffer_bytes if experts else 0), [], [], []
    with Engine(model, memory=MemoryPolicy(host=memory, activations=room)) as engine:
        if experts and engine.host_plan:
            experts.capacity = max(engine.host_plan.spare, 0)
        began = time.perf_counter()
        for (token,) in generate(engine, model, [prompt], max_new_tokens=count):
            seconds.append(time.perf_counter() - began)
            read.append(experts.read_bytes if experts else 0)
            made.append(token)
            began = time.perf_counter()
    found = {
        "a token, seconds": spread(seconds[1:]),
        "bytes of all experts": sum(spec.nbytes for spec in stacks),
    }
    if experts:
        of_tokens = [after - before for before, after in itertools.pairwise(read)]
        found |= {
            "expert bytes a token": statistics.median(of_tokens),
            "kept, bytes": experts.capacity,
        }
    return found, made


def drawn(block: int) -> Callable[[torch.nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """A hook that draws the experts of each token."""
    generator = torch.Generator().manual_seed(block)

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, chosen, *others = arguments
        evenly = torch.ones(len(chosen), int(module.num_experts))  # type: ignore[arg-type]
        return hidden, torch.multinomial(evenly, chosen.shape[1], generator=generator), *others

    return hook
