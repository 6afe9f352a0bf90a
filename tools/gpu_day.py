"""Check and measure everything on a GPU, most telling first, each job in a process of its own with
a time limit.

    python tools/gpu_day.py --minutes 8 --output results
    python tools/gpu_day.py --device cpu --tiny --minutes 2 --output results

Each job's result is written as it ends, so that an end at any moment loses nothing. A second call
with the same output leaves out what has a result. What does not fit into the minutes is left out
and named. Exits with 1 if a check has failed.

Checks and benchmarks are comparisons of ``bench.py``. In a check a run over blocks that stream has
the losses of transformers and peft on the whole model, or of a run alone: bit for bit, or within
the tolerance that the job names. What ``tests/core/test_gpu.py`` checks is one job.
"""

import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from benches.compare import compare
from formats import save_gpt_oss
from make_checkpoint import geometries, make_checkpoint, make_sparse_coded
from measuring import command, machine
from transformers import AutoModelForCausalLM, LlamaConfig

from zo2adapters import open_checkpoint
from zo2adapters.models.conversion import quantize
from zo2core import Engine

STEPS = 3
FLOAT16, FLOAT32, BFLOAT16 = torch.float16, torch.float32, torch.bfloat16
Result = dict[str, Any]


class Place(NamedTuple):
    """Where a job runs."""

    device: str
    tiny: bool  # whether models are so small that a CPU runs them in a second
    folder: Path  # for its files


class Job(NamedTuple):
    """A check or a benchmark."""

    seconds: int  # that it may take on a GPU
    run: Callable[[Place], Result]  # a check returns `equal`; a benchmark, numbers


def save_llama(place: Place, dtype: torch.dtype) -> Path:
    """A Llama of 4 blocks, or of 8 wider ones."""
    hidden, blocks = (64, 4) if place.tiny else (512, 8)
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": blocks,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))  # type: ignore[no-untyped-call]
    made.to(dtype).save_pretrained(place.folder / "base")
    return place.folder / "base"


def save_nf4(place: Place, dtype: torch.dtype) -> Path:
    """The Llama in nf4, as ``coded``, and what this decodes to, as ``base``."""
    plain = save_llama(place, dtype).rename(place.folder / "plain")
    quantize(plain, place.folder / "coded", "nf4")
    with Engine(open_checkpoint(place.folder / "coded")) as engine:
        engine.export(place.folder / "base")
    return place.folder / "base"


def save_mxfp4(place: Place, dtype: torch.dtype) -> Path:
    plain, coded = save_gpt_oss(place.folder)
    coded.rename(place.folder / "coded")
    return plain.rename(place.folder / "base")


def check(
    *sides: str,
    dtype: torch.dtype = FLOAT32,
    save: Callable[[Place, torch.dtype], Path] = save_llama,
    tolerance: float = 0.0,
) -> Job:
    """A comparison whose sides have to have the losses of the first."""

    def run(place: Place) -> Result:
        found = compared(place, save(place, dtype), sides, rows=2, tokens=24, unpadded=True)
        equal = all(row["losses apart"] <= tolerance for row in found["compared"].values())
        return {"equal": equal, "tolerance": tolerance, **found}

    return Job(40, run)


def check_tests(place: Place) -> Result:
    file = Path(__file__).parent.parent / "tests/core/test_gpu.py"
    return {"equal": place.tiny or pytest.main(["-q", str(file)]) == 0}


def bench(
    seconds: int,
    model: str,
    *sides: str,
    tokens: int = 2048,
    dtype: torch.dtype | None = None,
    encoding: str = "",
) -> Job:
    """A comparison of sides on a GPU, with a sparse checkpoint if there is a dtype; on the CPU of
    steps of a small model.
    """

    def run(place: Place) -> Result:
        if place.tiny:
            chosen = [side.replace("float16", "float32") for side in sides]
            return compared(place, save_llama(place, FLOAT32), chosen, tokens=6)
        base = place.folder / "base"
        if dtype is None:
            return compared(place, model, sides, tokens=tokens)
        if encoding:
            make_sparse_coded(geometries()[model], base, dtype=dtype, encoding=encoding)
        else:
            make_checkpoint(geometries()[model], base, dtype=dtype, sparse=True)
        return compared(place, base, sides, tokens=tokens)

    return Job(seconds, run)


def compared(place: Place, model: Path | str, sides: Any, **given: Any) -> Result:
    """What the comparison finds; on a CPU without a side's options from ``--gpu`` on."""
    chosen = [side.replace("CODED", str(place.folder / "coded")) for side in sides]
    if place.device == "cpu":
        chosen = [side.split("--gpu")[0] for side in chosen]
    [rows] = compare(str(model), sides=chosen, steps=STEPS, **given).values()
    return {
        "seconds": {name: row["step"]["median"] for name, row in rows.items()},
        "compared": rows,
    }


LORA, FULL, SHARED = (
    "--lora adamw --lr 1e-2",
    "--full adamw --lr 1e-3",
    "--lora adamw --gpu --device-memory 8GB",
)
JOBS = {
    "check: the tests of a GPU": Job(300, check_tests),
    "check: lora, float32, graphs kept": check(
        f"{LORA} --whole --gpu", f"{LORA} --gpu", f"{LORA} --buckets 2 --gpu"
    ),
    "check: lora, bfloat16, run anew": check(
        f"{LORA} --whole --gpu", f"{LORA} --recompute --gpu --kept 4", dtype=BFLOAT16
    ),
    # In float32: beside 16-bit weights that are not encoded, peft rounds an adapter's first values.
    "check: lora, nf4": check(
        f"{LORA} --whole --gpu", f"{LORA} --buckets 2 --model CODED --gpu", save=save_nf4
    ),
    "check: lora, mxfp4": check(
        f"{LORA} --whole --gpu", f"{LORA} --model CODED --gpu", save=save_mxfp4
    ),
    # The updates run on the host.
    "check: all parameters, graphs kept": check(
        f"{FULL} --whole --gpu", f"{FULL} --gpu", tolerance=1e-4
    ),
    "check: all parameters, run anew": check(
        f"{FULL} --whole --gpu", f"{FULL} --recompute --gpu", tolerance=1e-4
    ),
    "check: the first of two runs over one base": check(
        f"{LORA} --gpu", f"{LORA} --together 2 --gpu"
    ),
    "check: the second of two runs over one base": check(
        f"{LORA} --run 1 --gpu", f"{LORA} --run 1 --together 2 --gpu"
    ),
    "bench: mezo, opt-1.3b": bench(
        120, "opt-1.3b", "--dtype float16 --whole --gpu", "--dtype float16 --noise mezo --gpu"
    ),
    "bench: overlap, opt-1.3b": bench(120, "opt-1.3b", "--serial --gpu", "--gpu"),
    "bench: lora, opt-13b": bench(
        180, "opt-13b", "--lora adamw --whole --gpu", SHARED, tokens=512, dtype=BFLOAT16
    ),
    "bench: lora, qwen3-30b-a3b nf4": bench(
        180, "qwen3-30b-a3b", SHARED, tokens=512, dtype=BFLOAT16, encoding="nf4"
    ),
    "bench: disk to device": bench(
        60, "opt-6.7b", "--rank 2 --buckets 3 --gpu", tokens=64, dtype=FLOAT16
    ),
}


def file_of(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name) + ".json"


def run_job(name: str, device: str, output: Path, *, tiny: bool) -> None:
    """Run a job, write its result, and print it."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = JOBS[name].run(Place(device, tiny, Path(folder)))
        except Exception:
            result = {"equal": False, "error": traceback.format_exc(limit=4)}
    wall = time.perf_counter() - started
    partial = output / f"{file_of(name)}.partial"
    made = {"job": name, "machine": machine(), "wall_seconds": wall, **result}
    partial.write_text(json.dumps(made, indent=1, default=str))
    partial.replace(output / file_of(name))
    state = "" if result.get("equal", True) else "FAILED "
    print(f"{name:40s} {state}{wall:6.1f} s  {result.get('seconds', '')}", flush=True)


@command
def main(
    *,
    output: Annotated[Path, "folder for the results"] = Path("results"),
    minutes: float = 8.0,
    device: str = "cuda",
    tiny: Annotated[bool, "models for a CPU"] = False,
    only: Annotated[str, "part of the jobs' names"] = "",
    in_process: Annotated[bool, "run the jobs in this process, without limits"] = False,
) -> int:
    output.mkdir(parents=True, exist_ok=True)
    end, left_out, failed = time.monotonic() + 60 * minutes, [], []
    for name, job in JOBS.items():
        file, left = output / file_of(name), end - time.monotonic()
        if file.exists() or only not in name:
            continue
        limit = min(job.seconds, 60) if tiny else job.seconds
        if left < limit / 2:
            left_out.append(name)
            continue
        given: Any = {"target": run_job, "args": (name, device, output), "kwargs": {"tiny": tiny}}
        process = multiprocessing.get_context("spawn").Process(**given)
        if in_process:
            process.run()
        else:
            process.start()
            process.join(min(limit, left))
            if process.is_alive():
                process.kill()
                process.join()  # its memory on the device is free for the next one
                left_out.append(f"{name}, which was stopped after {min(limit, left):.0f} s")
                continue
        if not file.exists():
            failed.append(f"{name}, whose process ended without a result")
        elif not json.loads(file.read_text()).get("equal", True):
            failed.append(name)
    print(
        *(f"left out: {name}" for name in left_out),
        *(f"failed: {name}" for name in failed),
        sep="\n",
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
