"""Check and measure everything on a GPU, most telling first, each job in a process of its own with a time limit.

    python tools/gpu_day.py --minutes 8 --output results
    python tools/gpu_day.py --device cpu --tiny --minutes 2 --output results

Each job's result is written as it ends, so that an end at any moment loses nothing. A second call with the same output
leaves out what has a result. What does not fit into the minutes is left out and named. Exits with 1 if a check has failed.

Checks compare a run over blocks that stream with transformers and peft on the whole model, or with a run whose blocks all
stay on the device: equal bits, or the tolerance that the job names. What ``tests/core/test_gpu.py`` checks is one job, and
benchmarks are commands of ``bench.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import bench
import make_checkpoint
import pytest
import torch
from families import trained_by_peft
from formats import save_gpt_oss
from measuring import lora, machine
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.quantizer import quantize
from zo2core import DevicePlan, Engine, FirstOrder, HostPlan, MemoryPolicy, SharedBase, TorchOptimizer
from zo2core.encodings import GGUF_BLOCKS, GGUFRows
from zo2core.kernels.encoding import decode
from zo2core.types import ParameterSpec

STEPS = 3
ROOM = 1 << 28  # bytes for activations
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


def config_of(place: Place, **changes: Any) -> LlamaConfig:
    """A Llama of 4 blocks, or of 8 wider ones."""
    hidden, blocks = (64, 4) if place.tiny else (512, 8)
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
    }
    return LlamaConfig(**(sizes | changes))


def saved(place: Place, dtype: torch.dtype, config: PretrainedConfig | None = None) -> Path:
    torch.manual_seed(0)
    path = place.folder / f"base-{str(dtype)[6:]}"
    if not path.exists():
        made: Any = AutoModelForCausalLM.from_config(config_of(place) if config is None else config)  # type: ignore[no-untyped-call]
        made.to(dtype).save_pretrained(path)
    return path


def resident_model(path: Path, dtype: torch.dtype, place: Place) -> Any:
    whole: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return whole.to(place.device).eval()


def batch_of(seed: int, rows: int = 2, tokens: int = 24, vocabulary: int = 512) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def memory_of(place: Place, kept: int, room: int = ROOM) -> MemoryPolicy:
    """So many blocks stay on a GPU; on the CPU two buckets stream, or all blocks stay."""
    if place.device == "cpu":
        return MemoryPolicy(host=HostPlan((), 1 << 40, None if kept else 2, keep_noise=False), activations=room)
    return MemoryPolicy(device=DevicePlan((), 1 << 40, kept, room), activations=room)


def bits_equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Tensors whose bits are equal, and all."""
    same = [torch.equal(value.cpu(), theirs[name].cpu()) for name, value in ours.items()]
    return sum(same), len(same)


def check_lora(place: Place, *, dtype: torch.dtype, room: int, kept: int, quantized: str | None = None) -> Result:
    """A LoRA trained by AdamW over the stream, against peft on the whole model with the same (decoded) weights."""
    config = lora(4, lora_alpha=8)
    if quantized == "mxfp4":
        base, path = save_gpt_oss(place.folder)
    else:
        base = path = saved(place, dtype)
    if quantized == "nf4":
        path = place.folder / quantized
        quantize(base, path, quantized)
    make = partial(torch.optim.AdamW, lr=1e-2)
    whole = resident_model(base, dtype, place)
    if quantized == "nf4":
        with Engine(open_checkpoint(path)) as engine:
            for name, value in engine.parameters_now():
                whole.get_parameter(name).data.copy_(value)
    model = open_checkpoint(path, adapter=Adapter(config=config, seed=0))
    batch = batch_of(0, vocabulary=min(512, whole.config.vocab_size))
    with Engine(model, FirstOrder(make), device=place.device, memory=memory_of(place, kept, room)) as engine:
        first = {name: value.detach().clone() for name, value in engine.parameters.items()}
        losses = [engine.step(batch).loss for _ in range(STEPS)]
        ours = {name: value.detach().clone() for name, value in engine.parameters.items()}
    there = {key: value.to(place.device) for key, value in batch.items()}
    expected, theirs = trained_by_peft(whole, config, first, there, steps=STEPS, make=make)
    same, count = bits_equal(ours, theirs)
    return {"equal": same == count, "tensors": [same, count], "losses": [losses, expected]}


def check_full(place: Place, *, room: int) -> Result:
    """All parameters by AdamW, whose updates run on the host, against torch's on the device: within 1e-4."""
    base, make = saved(place, torch.float32), partial(torch.optim.AdamW, lr=1e-3)
    whole = resident_model(base, torch.float32, place)
    optimizer = make(whole.parameters())
    method = FirstOrder(TorchOptimizer(partial(torch.optim.AdamW, lr=1.0)), lr=1e-3)
    memory = MemoryPolicy(host=HostPlan((), 1 << 40, None, keep_noise=False), activations=room)
    if place.device != "cpu":
        memory = memory_of(place, 0, room)
    with Engine(open_checkpoint(base), method, device=place.device, memory=memory) as engine:
        for step in range(STEPS):
            batch = batch_of(step)
            whole(**{key: value.to(place.device) for key, value in batch.items()}).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.step(batch)
        far = max(
            float((value - whole.get_parameter(name).detach().cpu()).abs().max()) for name, value in engine.parameters_now()
        )
    return {"equal": far < 1e-4, "tolerance": 1e-4, "largest_difference": far}


def check_gguf(place: Place) -> Result:
    """Blocks of a GGUF file decoded on the device, against the gguf package: equal bits."""
    import gguf
    import numpy as np

    rng, wrong = np.random.default_rng(0), []
    for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0"):
        block, rows = GGUF_BLOCKS[name], 64
        codes = rng.integers(0, 256, (rows * 4, block.nbytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(np.array(gguf.dequantize(codes, gguf.GGMLQuantizationType[name]))).view(rows, -1)
        spec = ParameterSpec("weight", expected.shape, torch.float32, 0, decays=False, encoding=GGUFRows(name))
        stored = torch.from_numpy(codes).view(-1).to(place.device)
        out = torch.empty(expected.shape, dtype=torch.float32, device=place.device)
        decode(spec, stored, out, None)
        nan = torch.isnan(expected)
        if not torch.equal(out.cpu()[~nan], expected[~nan]):
            wrong.append(name)
    return {"equal": not wrong, "wrong": wrong}


def check_two_runs(place: Place) -> Result:
    """Two adapters over one base, stepped together, against each alone."""
    base, made, alone = saved(place, torch.float32), {}, {}
    method = FirstOrder(partial(torch.optim.AdamW, lr=1e-2))

    def run(seed: int, engine: Engine) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            engine.step(batch_of(10 * seed + step))
        return {name: value.detach().clone() for name, value in engine.parameters.items()}

    def model_of(seed: int) -> Any:
        return open_checkpoint(base, adapter=Adapter(config=lora(4, lora_alpha=8), seed=seed))

    for seed in (1, 2):
        with Engine(model_of(seed), method, device=place.device, memory=memory_of(place, 0)) as engine:
            alone[seed] = run(seed, engine)
    with ExitStack() as opened:
        shared = opened.enter_context(SharedBase(open_checkpoint(base), device=place.device))
        engines = {seed: opened.enter_context(Engine(model_of(seed), method, shared=shared)) for seed in (1, 2)}
        made = shared.together({seed: partial(run, seed, engine) for seed, engine in engines.items()})
    counts = [bits_equal(made[seed], alone[seed]) for seed in (1, 2)]  # type: ignore[arg-type]
    return {"equal": all(same == count for same, count in counts), "tensors": counts}


def check_tests(place: Place) -> Result:
    file = Path(__file__).parent.parent / "tests/core/test_gpu.py"
    return {"equal": place.tiny or pytest.main(["-q", str(file)]) == 0}


def compare(model: str, *sides: str, tokens: int = 2048, made: str = "") -> Callable[[Place], Result]:
    """A comparison of sides on a GPU; on the CPU of steps of a small model."""

    def run(place: Place) -> Result:
        chosen, name, length, output = list(sides), model, tokens, place.folder / "compared.json"
        if place.tiny:
            saved(place, torch.float32).rename(place.folder / "base")
            chosen, length = [side.split("--gpu")[0].replace("float16", "float32") for side in sides], 6
        elif made:
            called(make_checkpoint, model.removesuffix("-nf4"), str(place.folder / "base"), *made.split())
        if place.tiny or made:
            name = str(place.folder / "base")
        given = ["--tokens", str(length), "--steps", str(STEPS), "--output", str(output)]
        called(bench, "compare", name, *given, "--sides", *chosen)
        return {"compared": json.loads(output.read_text())}

    return run


def called(program: ModuleType, *arguments: str) -> None:
    with mock.patch.object(sys, "argv", [program.__name__, *arguments]):
        program.main()


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
JOBS: Mapping[str, Job] = {
    "check: the tests of a GPU": Job(300, check_tests),
    "check: lora, float32, graphs kept": Job(40, partial(check_lora, dtype=FLOAT32, room=ROOM, kept=0)),
    "check: lora, bfloat16, run anew": Job(40, partial(check_lora, dtype=BFLOAT16, room=1, kept=4)),
    "check: lora, nf4": Job(40, partial(check_lora, dtype=BFLOAT16, room=ROOM, kept=0, quantized="nf4")),
    "check: lora, mxfp4": Job(40, partial(check_lora, dtype=BFLOAT16, room=ROOM, kept=0, quantized="mxfp4")),
    "check: all parameters, graphs kept": Job(40, partial(check_full, room=ROOM)),
    "check: all parameters, run anew": Job(40, partial(check_full, room=1)),
    "check: gguf": Job(30, check_gguf),
    "check: two runs over one base": Job(40, check_two_runs),
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
        seconds = {side: statistics.median(times) for side, times in found.get("seconds", {}).items() if times}
        print(f"{name:40s} {'' if found.get('equal', True) else 'FAILED '}{found['wall_seconds']:6.1f} s  {seconds or ''}")
        if not found.get("equal", True):
            failed.append(name)
    if not options.in_process:
        print(*(f"left out: {name}" for name in left_out), *(f"failed: {name}" for name in failed), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
