"""A step of a program in ExecuTorch's runtime: against the same module in torch, and against two forwards in turn.

    python tools/bench_edge.py --output edge.json
    python tools/bench_edge.py --layers 8 --hidden 768 --shapes 1x16,4x64

All take turns in one process: a step of a program whose forward is XNNPACK's, one of the portable kernels, the exported
module in torch, and plain LoRA-FA over peft's model, which perturbs B in its weights and runs two forwards. A Llama with
random weights, LoRA of the queries and values. Torch has all cores, as XNNPACK has; `taskset -c 0` gives all of them one.
Prints a table and JSON: medians and ranges of seconds a step, and how long lowering took.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from measuring import keep, machine, spread
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from zo2adapters import Adapter, MonolithicMeZO, TrainingProgram, open_checkpoint, write_program
from zo2adapters.edge.assembly import assemble
from zo2adapters.trainers.verification import random_batch
from zo2core import Distribution
from zo2core.kernels import fill

WARM_UP = 2
ZO_EPS, LR = 1e-3, 1e-6
WAYS = ("xnnpack", "portable", "module", "two forwards")


def save_llama(directory: Path, options: argparse.Namespace) -> Path:
    """A checkpoint with random weights."""
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128),
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def lora(rank: int) -> Any:
    """The adapter's config, with matrices B that are not zero."""
    return peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def in_turn(base: Path, rank: int) -> MonolithicMeZO:
    """Plain LoRA-FA over peft's model."""
    whole = AutoModelForCausalLM.from_pretrained(base)
    peft.inject_adapter_in_model(lora(rank), whole)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = "lora_B" in name

    def draw(z: torch.Tensor, seed: int, parameter: int) -> None:
        fill(z, Distribution.RADEMACHER, seed, parameter)

    return MonolithicMeZO(whole, lr=LR, zo_eps=ZO_EPS, perturb_in_place=False, draw=draw)


def bench(base: Path, options: argparse.Namespace, rows: int, tokens: int) -> dict[str, Any]:
    """Measure one shape of batches."""
    batch = dict(random_batch(options.vocabulary, rows, tokens, seed=0))
    model = open_checkpoint(base, adapter=Adapter(config=lora(options.rank), frozen=("lora_A",)))
    lowering: dict[str, float] = {}
    programs: dict[str, TrainingProgram] = {}
    for name, partitioners in (("xnnpack", None), ("portable", ())):
        path, began = base.parent / f"{name}-{rows}x{tokens}.pte", time.perf_counter()
        write_program(path, model, rows=rows, tokens=tokens, zo_eps=ZO_EPS, partitioners=partitioners)
        lowering[name] = time.perf_counter() - began
        programs[name] = TrainingProgram(path)
    module = assemble(model, rows=rows, tokens=tokens, zo_eps=ZO_EPS, seed=0).step
    loop, lr = in_turn(base, options.rank), torch.tensor(LR)

    def step_module() -> None:
        with torch.inference_mode():
            module(batch["input_ids"], batch["labels"], lr)

    works: dict[str, Callable[[], object]] = {
        "xnnpack": lambda: programs["xnnpack"].step(batch, lr=LR),
        "portable": lambda: programs["portable"].step(batch, lr=LR),
        "module": step_module,
        "two forwards": lambda: loop.step(batch, 0),
    }
    measured: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(WARM_UP + options.steps):
        for name in WAYS:
            began = time.perf_counter()
            works[name]()
            if number >= WARM_UP:
                measured[name].append(time.perf_counter() - began)
    seconds = {name: spread(spans) for name, spans in measured.items()}
    return {"rows": rows, "tokens": tokens, "lowering": lowering, **seconds}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--shapes", default="1x16,1x64", help="shapes of batches, as rows x tokens")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    described = {key: getattr(options, key) for key in ("layers", "hidden", "vocabulary", "rank", "steps")}
    measured: dict[str, Any] = {"machine": machine() | {"threads": torch.get_num_threads()}, **described, "shapes": []}
    print("rows x tokens" + "".join(f"{name:>14s}" for name in WAYS))
    with tempfile.TemporaryDirectory() as folder:
        base = save_llama(Path(folder) / "base", options)
        for rows, tokens in shapes:
            shape = bench(base, options, rows, tokens)
            measured["shapes"].append(shape)
            print(f"{f'{rows} x {tokens}':>13s}" + "".join(f"{shape[name]['median']:13.4f}s" for name in WAYS), flush=True)
    keep(measured, options.output)


if __name__ == "__main__":
    main()
