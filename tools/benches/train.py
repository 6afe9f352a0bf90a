"""Take training steps, or one evaluation sweep, on a checkpoint of any size; compare time and peak memory with `zo2 plan`.

    python tools/bench.py train opt-13b --rows 1 --tokens 64 --steps 2
    python tools/bench.py train opt-175b --evaluate-only --rows 1 --tokens 16
    python tools/bench.py train opt-13b --rank 2 --queries 4 --tokens 64 --steps 20 --no-scratch
    python tools/bench.py train opt-13b --method adamw --rows 8 --tokens 256 --micro-rows 2
    python tools/bench.py train opt-13b --method badam --full --stream --memory 8GiB --tokens 64 --steps 2
    python tools/bench.py train llama-8b-q4k/model.gguf --dtype bfloat16 --rank 2 --memory 4GB --no-scratch

With ``--rank`` directions are low-rank, and blocks are only read. With ``--method`` a LoRA adapter of queries and values is
trained by gradients, and with ``--full`` all parameters. The peak is the kernel's count of this process's resident memory.
``to the slowest lane`` is the ratio of steps to the busy time of their slowest lane.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, get_args

from measuring import add_sizes, lanes_of, spread, timed, zo2
from peft import LoraConfig

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.footprint import activation_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.allocator import SMALL, keep_freed_memory, peak_memory
from zo2adapters.trainers.optimization import Noise, Optimization
from zo2adapters.trainers.step_memory import reserved_bytes
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, FirstOrder, MemoryPolicy, WriteBackPolicy, ZerothOrder
from zo2core.names import OptimizerName
from zo2core.optimizers import OPTIMIZERS, make_block_update
from zo2core.planning.memory import resident_memory

LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path)
    parser.add_argument("--memory", default="auto")
    add_sizes(parser, steps=4)
    noises = [noise.value for noise in Noise]
    parser.add_argument("--noise", choices=noises, default="rademacher", help="mezo is exact MeZO")
    parser.add_argument("--rank", type=int, help="rank of the directions; by default they are full-rank")
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="of computation")
    parser.add_argument("--precision", choices=["exact", "mixed"], default="exact")
    parser.add_argument("--method", choices=get_args(OptimizerName), help="train a LoRA adapter by this optimizer")
    parser.add_argument("--full", action="store_true", help="with --method: train all parameters")
    parser.add_argument("--stream", action="store_true", help="with --full: stream blocks from disk")
    parser.add_argument("--micro-rows", type=int, help="with --method: rows that run at a time")
    parser.add_argument("--evaluate-only", action="store_true")
    parser.add_argument("--no-scratch", action="store_true", help="never write back")


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return bench(options, Path(folder))


def planned(options: argparse.Namespace, run: Path) -> dict[str, Any]:
    """The plan of ``zo2 plan``, in a process of its own, whose memory does not count."""
    given: dict[str, Any] = {"model": options.directory, "memory": options.memory, "output": run, "dtype": options.dtype}
    given |= {"batch-size": options.rows, "sequence-length": options.tokens, "method": options.method}
    if options.method is None:
        given |= {"noise": options.noise, "queries": options.queries, "rank": options.rank}
    elif not options.full:
        LORA.save_pretrained(str(run / "lora"))
        given["adapter"] = run / "lora/adapter_config.json"
    given["micro-batch-size"] = options.micro_rows
    given["precision"] = options.precision if options.method is None or options.full else None
    arguments = [part for name, value in given.items() if value is not None for part in (f"--{name}", value)]
    plan: dict[str, Any] = json.loads(
        zo2("plan", *arguments, "--json", *(["--method", "stream_blocks"] if options.stream else []))
    )
    return plan


def zeroth_order_engine(options: argparse.Namespace, model: HFBlockModel, run: Path) -> Engine:
    """An engine as ``zo2 train`` makes it."""
    noise = Noise(options.noise)
    optimization = Optimization(noise=noise, exact_mezo=noise is Noise.MEZO, rank=options.rank, queries=options.queries)
    streams, stacked, chunk = optimization.evaluations, optimization.stacked, model.loss_chunk
    sizes = (model.config, options.rows, options.tokens)
    activations = activation_bytes(*sizes, streams=streams, loss_chunk=chunk, stacked=stacked)
    method = ZerothOrder(
        optimization.estimator_of(options.steps),
        noise=optimization.generator(model.layouts),
        perturbation=optimization.perturbation,
    )
    return Engine(
        model,
        method,
        journal=run / "journal.jsonl",
        memory=MemoryPolicy(host=options.memory, activations=activations),
        write_back=None if options.evaluate_only or options.no_scratch else WriteBackPolicy(directory=run),
    )


def first_order_engine(options: argparse.Namespace, model: HFBlockModel, run: Path) -> Engine:
    """An engine that trains by gradients, with memory as ``zo2 train`` reserves it."""
    update = make_block_update(options.method, weight_decay=0.0) if options.full else None
    activations, least = reserved_bytes(model, options.rows, options.tokens, options.micro_rows, update)
    memory = MemoryPolicy(host=options.memory, activations=activations, least_activations=least)
    given: dict[str, Any] = {"memory": memory, "micro_batch_size": options.micro_rows}
    given |= {"run": run, "commit_every": 1} if options.stream else {"spill": run}
    if update is not None:
        return Engine(model, FirstOrder(update, lr=1e-6), **given)
    of_adapter = OPTIMIZERS[options.method].of_adapter
    assert of_adapter is not None, "others train all parameters"
    return Engine(model, FirstOrder(partial(of_adapter, lr=1e-4)), **given)


def bench(options: argparse.Namespace, run: Path) -> dict[str, Any]:
    """Plan, open and run; return bytes and seconds."""
    imported = resident_memory()
    if options.method is not None:
        keep_freed_memory(SMALL)
    plan = planned(options, run)
    has_adapter = options.method is not None and not options.full
    given: Any = {"adapter": Adapter(config=LORA, seed=0)} if has_adapter else {"precision": options.precision}
    opening, model = timed(partial(open_checkpoint, options.directory, dtype=options.dtype, **given))
    measured: dict[str, Any] = {
        "imported_bytes": imported,
        "seconds of opening": opening,
        "planned_bytes": plan["nbytes"],
        "planned seconds": plan["seconds"],
    }
    batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
    blocks = [layout for layout in model.layouts if not layout.resident]
    with (zeroth_order_engine if options.method is None else first_order_engine)(options, model, run) as engine:
        assert engine.host_plan is not None
        # `zo2 plan` finds less free memory while this process runs.
        measured |= {"arranged_bytes": engine.host_plan.nbytes, "buckets": engine.host_plan.buckets, "blocks": len(blocks)}
        if options.evaluate_only:
            result = engine.evaluate([batch])
            measured |= {"evaluation seconds": result.seconds, "loss": result.loss}
        else:
            steps = [engine.step(batch) for _ in range(options.steps)]
            settled = steps[2 if options.method is None else 1 :] or steps
            seconds = statistics.median(step.seconds for step in settled)
            measured |= {
                "step": spread([step.seconds for step in settled]),
                "seconds to planned": seconds / plan["seconds"],
                "to the slowest lane": spread([step.seconds / step.bound_seconds for step in settled]),
                "write back every": engine.write_back_every,
                "lanes": lanes_of(settled),
                "seconds of steps": [step.seconds for step in steps],
                "losses": [step.loss for step in steps],
            }
    return measured | {
        "blocks_bytes": sum(spec.stored_numel * spec.stored_dtype.itemsize for block in blocks for spec in block.parameters),
        "peak_bytes": peak_memory(),
        "peak to planned": peak_memory() / plan["nbytes"],
        "peak to arranged": peak_memory() / measured["arranged_bytes"],
        "plan": [plan],
    }
