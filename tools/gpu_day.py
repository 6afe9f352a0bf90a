"""Check and measure everything on a GPU, most telling first, each job in a process of its own with a time limit.

    python tools/gpu_day.py --minutes 8 --output results
    python tools/gpu_day.py --device cpu --tiny --minutes 2 --output results

Each job's result is written as it ends, so that an end at any moment loses nothing. A second call with the same output
leaves out what has a result. What does not fit into the minutes is left out and named. Exits with 1 if a check has failed.

Checks and benchmarks are comparisons of ``bench.py``. In a check a run over blocks that stream has the losses of
transformers and peft on the whole model, or of a run alone: bit for bit, or within the tolerance that the job names. What
``tests/core/test_gpu.py`` checks is one job.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import bench
import make_checkpoint
import pytest
import torch
from formats import save_gpt_oss
from measuring import machine
from transformers import AutoModelForCausalLM, LlamaConfig

from zo2adapters import open_checkpoint
from zo2adapters.models.conversion import quantize
from zo2core import Engine

STEPS = 3
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
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": blocks}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))  # type: ignore[no-untyped-call]
    made.to(dtype).save_pretrained(place.folder / "base")
    return place.folder / "base"


def save_nf4(place: Place) -> Path:
    """The Llama in nf4, as ``coded``, and what this decodes to, as ``base``."""
    plain = save_llama(place, torch.bfloat16).rename(place.folder / "plain")
    quantize(plain, place.folder / "coded", "nf4")
    with Engine(open_checkpoint(place.folder / "coded")) as engine:
        engine.export(place.folder / "base")
    return place.folder / "base"


def save_mxfp4(place: Place) -> Path:
    plain, coded = save_gpt_oss(place.folder)
    coded.rename(place.folder / "coded")
    return plain.rename(place.folder / "base")


def check(
    *sides: str, save: Callable[..., Path] = save_llama, dtype: torch.dtype | None = None, tolerance: float = 0.0
) -> Callable[[Place], Result]:
    """A comparison whose sides have to have the losses of the first."""

    def run(place: Place) -> Result:
        base = save(place) if dtype is None else save(place, dtype)
        found = compared(place, base, sides, "--rows", "2", "--tokens", "24", "--unpadded")
        equal = all(row["losses apart"] <= tolerance for row in found["compared"].values())
        return {"equal": equal, "tolerance": tolerance, **found}

    return run


def check_tests(place: Place) -> Result:
    file = Path(__file__).parent.parent / "tests/core/test_gpu.py"
    return {"equal": place.tiny or pytest.main(["-q", str(file)]) == 0}


def compare(model: str, *sides: str, tokens: int = 2048, made: str = "") -> Callable[[Place], Result]:
    """A comparison of sides on a GPU; on the CPU of steps of a small model."""

    def run(place: Place) -> Result:
        if place.tiny:
            chosen = [side.replace("float16", "float32") for side in sides]
            return compared(place, save_llama(place, torch.float32), chosen, "--tokens", "6")
        if made:
            called(make_checkpoint, model.removesuffix("-nf4"), str(place.folder / "base"), *made.split())
        return compared(place, place.folder / "base" if made else model, sides, "--tokens", str(tokens))

    return run


def compared(place: Place, model: Path | str, sides: Sequence[str], *given: str) -> dict[str, Any]:
    """What the comparison finds; on a CPU without a side's options from ``--gpu`` on."""
    output, coded = place.folder / "compared.json", str(place.folder / "coded")
    chosen = [side.replace("CODED", coded) for side in sides]
    if place.device == "cpu":
        chosen = [side.split("--gpu")[0] for side in chosen]
    called(bench, "compare", str(model), *given, "--steps", str(STEPS), "--output", str(output), "--sides", *chosen)
    [rows] = [rows for name, rows in json.loads(output.read_text()).items() if " x " in name]
    return {"seconds": {name: row["step"]["median"] for name, row in rows.items()}, "compared": rows}


def called(program: ModuleType, *arguments: str) -> None:
    with mock.patch.object(sys, "argv", [program.__name__, *arguments]):
        program.main()


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
LORA, FULL = "--lora adamw --lr 1e-2", "--full adamw --lr 1e-3"
JOBS: Mapping[str, Job] = {
    "check: the tests of a GPU": Job(300, check_tests),
    "check: lora, float32, graphs kept": Job(
        40, check(f"{LORA} --whole --gpu", f"{LORA} --gpu", f"{LORA} --buckets 2 --gpu", dtype=FLOAT32)
    ),
    "check: lora, bfloat16, run anew": Job(
        40, check(f"{LORA} --whole --gpu", f"{LORA} --recompute --gpu --kept 4", dtype=BFLOAT16)
    ),
    "check: lora, nf4": Job(40, check(f"{LORA} --whole --gpu", f"{LORA} --buckets 2 --model CODED --gpu", save=save_nf4)),
    "check: lora, mxfp4": Job(40, check(f"{LORA} --whole --gpu", f"{LORA} --model CODED --gpu", save=save_mxfp4)),
    # The updates run on the host.
    "check: all parameters, graphs kept": Job(
        40, check(f"{FULL} --whole --gpu", f"{FULL} --gpu", dtype=FLOAT32, tolerance=1e-4)
    ),
    "check: all parameters, run anew": Job(
        40, check(f"{FULL} --whole --gpu", f"{FULL} --recompute --gpu", dtype=FLOAT32, tolerance=1e-4)
    ),
    "check: two runs over one base": Job(40, check(f"{LORA} --gpu", f"{LORA} --together 2 --gpu", dtype=FLOAT32)),
    "bench: mezo, opt-1.3b": Job(
        120, compare("opt-1.3b", "--dtype float16 --whole --gpu", "--dtype float16 --noise mezo --gpu")
    ),
    "bench: overlap, opt-1.3b": Job(120, compare("opt-1.3b", "--serial --gpu", "--gpu")),
    "bench: lora, opt-13b": Job(
        180,
        compare(
            "opt-13b",
            "--lora adamw --whole --gpu",
            "--lora adamw --gpu --device-memory 8GB",
            tokens=512,
            made="--dtype bfloat16 --sparse",
        ),
    ),
    "bench: lora, qwen3-30b-a3b nf4": Job(
        180,
        compare(
            "qwen3-30b-a3b-nf4", "--lora adamw --gpu --device-memory 8GB", tokens=512, made="--dtype bfloat16 --sparse --nf4"
        ),
    ),
    "bench: disk to device": Job(60, compare("opt-6.7b", "--rank 2 --buckets 3 --gpu", tokens=64, made="--sparse")),
}


def run_job(name: str, place: Place) -> Result:
    started = time.perf_counter()
    try:
        result = JOBS[name].run(place)
    except Exception:
        result = {"equal": False, "error": traceback.format_exc(limit=4)}
    return {"job": name, "machine": machine(), "wall_seconds": time.perf_counter() - started, **result}


def file_of(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name) + ".json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models for a CPU")
    parser.add_argument("--only", help="part of the jobs' names")
    parser.add_argument("--in-process", action="store_true", help="run the jobs in this process, without limits")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    end, left_out, failed = time.monotonic() + 60 * options.minutes, [], []
    for name, job in JOBS.items():
        file = options.output / file_of(name)
        if file.exists() or (options.only is not None and options.only not in name):
            continue
        left = end - time.monotonic()
        limit = job.seconds if not options.tiny else min(job.seconds, 60)
        if left < limit / 2:
            left_out.append(name)
            continue
        if options.in_process:
            with tempfile.TemporaryDirectory() as folder:
                result = run_job(name, Place(options.device, options.tiny, Path(folder)))
            partial_file = file.with_suffix(".partial")
            partial_file.write_text(json.dumps(result, indent=1))
            partial_file.replace(file)
        else:
            command = [sys.executable, __file__, "--in-process", "--only", name, "--output", options.output]
            command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
            try:
                subprocess.run(list(map(str, command)), timeout=min(limit, left), check=False)
            except subprocess.TimeoutExpired:
                left_out.append(f"{name}, which was stopped after {min(limit, left):.0f} s")
                continue
        if not file.exists():
            failed.append(f"{name}, whose process ended without a result")
            continue
        found = json.loads(file.read_text())
        state, seconds = "" if found.get("equal", True) else "FAILED ", found.get("seconds", "")
        if options.in_process:  # else the job's process has printed it
            print(f"{name:40s} {state}{found['wall_seconds']:6.1f} s  {seconds}")
        if not found.get("equal", True):
            failed.append(name)
    if not options.in_process:
        print(*(f"left out: {name}" for name in left_out), *(f"failed: {name}" for name in failed), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
