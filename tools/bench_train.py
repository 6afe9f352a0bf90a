"""Take training steps, or one evaluation sweep, on a checkpoint of any size; compare time and peak memory with `zo2 plan`.

    python tools/bench_train.py /tmp/opt-13b --memory auto --rows 1 --tokens 64 --steps 2
    python tools/bench_train.py /tmp/opt-175b --evaluate-only --rows 1 --tokens 16
    python tools/bench_train.py /tmp/opt-13b --rank 2 --queries 4 --tokens 64 --steps 20
    python tools/bench_train.py /tmp/opt-13b --method adamw --rows 8 --tokens 256 --micro-rows 2
    python tools/bench_train.py /tmp/opt-350m --method lomo --full --rows 4 --tokens 256
    python tools/bench_train.py /tmp/llama-8b-q4k/model.gguf --dtype bfloat16 --rank 2 --memory 4GB --no-scratch
    python tools/bench_train.py /tmp/opt-13b --method badam --full --stream --memory 8GiB --tokens 64 --steps 2

With ``--rank`` directions are low-rank, and blocks are only read. With ``--method`` a LoRA adapter of queries and values is
trained by gradients, and with ``--full`` all parameters. Prints a table and JSON: the time of steps, bytes read and written,
and the ratio of each step to its slowest lane. The peak is the kernel's count of this process's resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, get_args

from measuring import spread
from peft import LoraConfig

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.footprint import activation_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.allocator import SMALL, keep_freed_memory
from zo2adapters.trainers.optimization import Noise, Optimization
from zo2adapters.trainers.step_memory import reserved_bytes
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, FirstOrder, MemoryPolicy, WriteBackPolicy, ZerothOrder
from zo2core.names import OptimizerName
from zo2core.optimizers import OPTIMIZERS, make_block_update
from zo2core.planning.memory import resident_memory
from zo2core.types import Lane


def peak() -> int:
    """The peak of this process's resident bytes so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def planned(options: argparse.Namespace, run: Path) -> dict[str, Any]:
    """The plan of ``zo2 plan``, in a process of its own, whose memory does not count."""
    batching = ["--batch-size", str(options.rows), "--sequence-length", str(options.tokens), "--noise", options.noise]
    batching += ["--precision", options.precision, "--queries", str(options.queries)]
    batching += [] if options.rank is None else ["--rank", str(options.rank)]
    if options.method is not None:
        lora().save_pretrained(str(run / "lora"))
        batching = ["--batch-size", str(options.rows), "--sequence-length", str(options.tokens)]
        batching += [] if options.micro_rows is None else ["--micro-batch-size", str(options.micro_rows)]
        batching += ["--method", options.method]
        batching += (
            ["--precision", options.precision] if options.full else ["--adapter", str(run / "lora/adapter_config.json")]
        )
        batching += ["--stream-blocks"] if options.stream else []
    command = [
        "plan",
        "--model",
        str(options.directory),
        "--memory",
        options.memory,
        "--output",
        str(run),
        "--json",
        "--dtype",
        options.dtype,
        *batching,
    ]
    done = subprocess.run([sys.executable, "-m", "zo2adapters.cli", *command], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def lora() -> LoraConfig:
    """An adapter of the projections of queries and values."""
    return LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])


def first_order_engine(options: argparse.Namespace, model: HFBlockModel, run: Path) -> Engine:
    """An engine that trains by gradients, with memory as ``zo2 train`` reserves it."""
    update = make_block_update(options.method, weight_decay=0.0) if options.full else None
    activations, least = reserved_bytes(model, options.rows, options.tokens, options.micro_rows, update)
    memory = MemoryPolicy(host=options.memory, activations=activations, least_activations=least)
    if update is not None:
        if options.stream:
            rows = options.micro_rows
            return Engine(model, FirstOrder(update, lr=1e-6), memory=memory, micro_batch_size=rows, run=run, commit_every=1)
        return Engine(model, FirstOrder(update, lr=1e-6), memory=memory, spill=run, micro_batch_size=options.micro_rows)
    of_adapter = OPTIMIZERS[options.method].of_adapter
    assert of_adapter is not None, "others train all parameters"
    optimizer = partial(of_adapter, lr=1e-4)
    return Engine(model, FirstOrder(optimizer), memory=memory, spill=run, micro_batch_size=options.micro_rows)


def bench_first_order(options: argparse.Namespace, run: Path) -> dict[str, Any]:
    """Plan, open and run first-order steps; return bytes and seconds."""
    keep_freed_memory(SMALL)
    plan = planned(options, run)
    if options.full:
        model = open_checkpoint(options.directory, dtype=options.dtype, precision=options.precision)
    else:
        model = open_checkpoint(options.directory, dtype=options.dtype, adapter=Adapter(config=lora(), seed=0))
    with first_order_engine(options, model, run) as engine:
        assert engine.host_plan is not None
        host_plan = engine.host_plan
        layouts = [layout for layout in model.layouts if not layout.resident]
        batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
        steps = []
        for _ in range(options.steps):
            steps.append(engine.step(batch))
            print(f"step {len(steps)}: {steps[-1].seconds:.2f} s, loss {steps[-1].loss:.4f}", flush=True)
        settled = steps[1:] or steps
        stored = sum(spec.stored_numel * spec.stored_dtype.itemsize for layout in layouts for spec in layout.parameters)
        streamed = stored * max(len(layouts) - (host_plan.buckets or len(layouts)), 0) / len(layouts)
        return {
            "method": options.method,
            "all_parameters": options.full,
            "directory": options.directory.name,
            "rows": options.rows,
            "tokens": options.tokens,
            "micro_rows": options.micro_rows,
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "blocks": len(layouts),
            "buckets": host_plan.buckets,
            "arranged_bytes": host_plan.nbytes,
            "planned_bytes": plan["nbytes"],
            "planned_seconds": plan["seconds"],
            "step_seconds": [step.seconds for step in steps],
            "settled_seconds": statistics.median(step.seconds for step in settled),
            "losses": [step.loss for step in steps],
            "lanes": [{lane.value: use.busy_seconds for lane, use in step.lanes.items()} for step in steps],
            "read_bytes": statistics.median(step.lanes[Lane.READ].nbytes for step in settled),
            "two_passes_without_buckets_bytes": 2 * streamed,
            "written_bytes": sum(step.lanes[Lane.WRITE].nbytes for step in steps),
            "against_slowest_lane": spread([step.seconds / step.bound_seconds for step in settled]),
            "peak_bytes": peak(),
            "peak_against_planned": peak() / plan["nbytes"],  # with the graphs for which memory is spare
        }


def bench(options: argparse.Namespace, run: Path) -> dict[str, Any]:
    """Plan, open and run; return bytes and seconds."""
    imported = resident_memory()
    plan = planned(options, run)
    began = time.perf_counter()
    model = open_checkpoint(options.directory, dtype=options.dtype, precision=options.precision)
    opened = {"seconds": time.perf_counter() - began, "peak_bytes": peak()}
    batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
    noise = Noise(options.noise)
    exact_mezo = noise is Noise.MEZO
    optimization = Optimization(noise=noise, exact_mezo=exact_mezo, rank=options.rank, queries=options.queries)
    activations = activation_bytes(
        model.config,
        options.rows,
        options.tokens,
        streams=optimization.evaluations,
        loss_chunk=model.loss_chunk,
        stacked=optimization.stacked,
    )
    measured: dict[str, Any] = {
        "noise": options.noise,
        "precision": options.precision,
        "rank": options.rank,
        "queries": options.queries,
        "directory": options.directory.name,
        "dtype": str(model.layouts[0].parameters[0].dtype),
        "rows": options.rows,
        "tokens": options.tokens,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "imported_bytes": imported,
        "opened": opened,
        "planned_bytes": plan["nbytes"],
        "planned_seconds": plan["seconds"],
        "plan": plan,
    }
    with Engine(
        model,
        ZerothOrder(
            optimization.estimator_of(options.steps),
            noise=optimization.generator(model.layouts),
            perturbation=optimization.perturbation,
        ),
        journal=run / "journal.jsonl",
        memory=MemoryPolicy(host=options.memory, activations=activations),
        write_back=None if options.evaluate_only or options.no_scratch else WriteBackPolicy(directory=run),
    ) as engine:
        assert engine.host_plan is not None
        measured["arranged"] = {"buckets": engine.host_plan.buckets, "keep_noise": engine.host_plan.keep_noise}
        measured["arranged_bytes"] = engine.host_plan.nbytes  # `zo2 plan` finds less free memory while this process runs
        if options.evaluate_only:
            result = engine.evaluate([batch])
            measured |= {"evaluation_seconds": result.seconds, "loss": result.loss}
        else:
            steps = [engine.step(batch) for _ in range(options.steps)]
            seconds = [step.seconds for step in steps]
            settled = seconds[2:] or seconds
            measured |= {
                "step_seconds": seconds,
                "settled_seconds": statistics.median(settled),
                "losses": [step.loss for step in steps],
                "lanes": [{lane.value: use.busy_seconds for lane, use in step.lanes.items()} for step in steps],
                "read_bytes": statistics.median(step.lanes[Lane.READ].nbytes for step in steps),
                "written_bytes": sum(step.lanes[Lane.WRITE].nbytes for step in steps),
                "against_slowest_lane": spread([step.seconds / step.bound_seconds for step in steps[1:] or steps]),
                "write_back_every": engine.write_back_every,
                "seconds_against_plan": statistics.median(settled) / plan["seconds"],
            }
    measured["peak_bytes"] = peak()
    measured["peak_against_arranged"] = measured["peak_bytes"] / measured["arranged_bytes"]
    return measured


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--noise",
        choices=[noise.value for noise in Noise],
        default="rademacher",
        help="noise of the directions; mezo is exact MeZO",
    )
    parser.add_argument("--rank", type=int, default=None, help="rank of the directions; by default they are full-rank")
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="of computation")
    parser.add_argument("--precision", choices=["exact", "mixed"], default="exact")
    parser.add_argument(
        "--method", choices=get_args(OptimizerName), default=None, help="train a LoRA adapter by this optimizer"
    )
    parser.add_argument("--full", action="store_true", help="with --method: train all parameters")
    parser.add_argument("--stream", action="store_true", help="with --full: stream blocks from disk")
    parser.add_argument("--micro-rows", type=int, default=None, help="with --method: rows that run at a time")
    parser.add_argument("--evaluate-only", action="store_true")
    parser.add_argument("--no-scratch", action="store_true", help="never write back")
    parser.add_argument("--folder", type=Path, default=None, help="folder for the run's files; a temporary one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = bench if options.method is None else bench_first_order
        measured = run(options, Path(folder))
    print()
    for key, value in measured.items():
        if key.endswith("_bytes"):
            print(f"{key:24s} {value / 1e9:10.3f} GB")
        elif isinstance(value, float):
            print(f"{key:24s} {value:10.3f}")
        elif key == "against_slowest_lane":
            print(f"{key:24s} {value['median']:10.3f} [{value['min']:.3f} - {value['max']:.3f}]")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
