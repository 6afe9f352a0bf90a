"""Check and measure everything on a GPU, most telling first, each job in a process of its own with a time limit.

    python tools/gpu_day.py --minutes 8 --output results
    python tools/gpu_day.py --device cpu --tiny --minutes 2 --output results

Each job's JSON is written as it ends, so that an end at any moment loses nothing. A second call with the same output leaves
out what has a result. What does not fit into the minutes is left out and named. Exits with 1 if a check has failed.

Checks compare a run over blocks that stream with transformers and peft on the whole model, or with a run whose blocks all
stay on the device: equal bits, or the tolerance that the job names. Benchmarks time a step on both sides in one process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from zo2adapters import Adapter, MonolithicMeZO, open_checkpoint
from zo2adapters.models.quantizer import quantize
from zo2adapters.tasks.generation import generate
from zo2core import (
    DevicePlan,
    Distribution,
    Engine,
    EvolutionStrategies,
    FirstOrder,
    HostPlan,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    MultiQueryRGE,
    PhiloxNoise,
    SharedBase,
    TorchOptimizer,
    ZerothOrder,
)
from zo2core.encodings import GGUF_BLOCKS, GGUFRows
from zo2core.kernels.encoding import decode
from zo2core.types import Lane, ParameterSpec

STEPS = 3
ROOM = 1 << 28  # bytes for activations
Result = dict[str, Any]


class Place(NamedTuple):
    """Where a job runs."""

    device: str
    tiny: bool  # whether models are so small that a CPU runs them in a second
    folder: Path  # for its files
    output: Path  # for what is kept beside its result


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
    """A checkpoint with random weights."""
    torch.manual_seed(0)
    path = place.folder / f"base-{str(dtype)[6:]}"
    if not path.exists():
        made: Any = AutoModelForCausalLM.from_config(config_of(place) if config is None else config)  # type: ignore[no-untyped-call]
        made.to(dtype).save_pretrained(path)
    return path


def resident_model(path: Path, dtype: torch.dtype, place: Place) -> Any:
    """The whole model on the device."""
    whole: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return whole.to(place.device).eval()


def with_adapter(whole: Any, config: Any) -> Any:
    """The model with peft's layers, whose parameters are trained, in float32 as peft keeps them."""
    import peft

    resident: Any = peft.inject_adapter_in_model(config, whole)
    for name, value in resident.named_parameters():
        if "lora_" in name:
            value.data = value.data.float()
        value.requires_grad_("lora_" in name)
    return resident.eval()


def batch_of(seed: int, rows: int = 2, tokens: int = 24, vocabulary: int = 512) -> dict[str, torch.Tensor]:
    """Random tokens, all of them labels."""
    ids = torch.randint(3, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def memory_of(place: Place, kept: int, room: int = ROOM) -> MemoryPolicy:
    """So many blocks stay on a GPU; on the CPU two buckets stream, or all blocks stay."""
    if place.device == "cpu":
        return MemoryPolicy(host=HostPlan((), 1 << 40, None if kept else 2, keep_noise=False), activations=room)
    return MemoryPolicy(device=DevicePlan((), 1 << 40, kept, room), activations=room)


def lora(*, initial_zero: bool = True) -> Any:
    """A LoRA's config."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=initial_zero)


def bits_equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Tensors whose bits are equal, and all."""
    same = [torch.equal(value.cpu(), theirs[name].cpu()) for name, value in ours.items()]
    return sum(same), len(same)


def check_lora(place: Place, *, dtype: torch.dtype, room: int, kept: int, quantized: str | None = None) -> Result:
    """A LoRA trained by AdamW over the stream, against peft on the whole model with the same (decoded) weights."""
    config = lora()
    if quantized == "mxfp4":
        from coded_checkpoints import save_gpt_oss

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
    resident = with_adapter(whole, config)
    trained = [(name, value) for name, value in resident.named_parameters() if value.requires_grad]
    model = open_checkpoint(path, adapter=Adapter(config=config, seed=0))
    with Engine(model, FirstOrder(make), device=place.device, memory=memory_of(place, kept, room)) as engine:
        ours = engine.parameters
        names = {name: next(key for key, _ in trained if key.endswith(name.split("model.", 1)[-1])) for name in ours}
        for name, value in ours.items():
            resident.get_parameter(names[name]).data.copy_(value.detach())
        optimizer, losses = make([resident.get_parameter(names[name]) for name in ours]), []
        for step in range(STEPS):
            batch = batch_of(step, vocabulary=min(512, whole.config.vocab_size))
            loss = resident(**{key: value.to(place.device) for key, value in batch.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append((engine.step(batch).loss, float(loss.detach())))
        theirs = {name: resident.get_parameter(names[name]).detach() for name in ours}
        same, count = bits_equal({name: value.detach() for name, value in ours.items()}, theirs)
    return {"equal": same == count, "tensors": [same, count], "losses": losses}


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


def outcome(engine: Engine, seeds: Sequence[int]) -> list[Any]:
    """Losses of some steps, and the weights after them."""
    losses = [engine.step(batch_of(seed)).losses for seed in seeds]
    return [losses, {name: value.clone() for name, value in engine.parameters_now()}]


def same_outcome(one: list[Any], other: list[Any]) -> Result:
    """Whether losses and weights are equal."""
    same, count = bits_equal(one[1], other[1])
    return {"equal": one[0] == other[0] and same == count, "tensors": [same, count], "losses": [one[0], other[0]]}


def check_forwards(place: Place, *, dtype: torch.dtype, **method: Any) -> Result:
    """Zeroth-order steps with no block kept on the device, against all of them kept."""
    estimator = MultiQueryRGE(lr=1e-2, zo_eps=1e-3, q=2, perturb_in_place=False)
    outcomes = []
    for kept in (0, 8):
        made = ZerothOrder(estimator, noise=PhiloxNoise(Distribution.RADEMACHER), **method)
        model = open_checkpoint(saved(place, dtype))
        with Engine(model, made, device=place.device, memory=memory_of(place, kept)) as engine:
            outcomes.append(outcome(engine, range(STEPS)))
    return same_outcome(*outcomes)


def check_mezo(place: Place) -> Result:
    """Exact MeZO over the stream, against monolithic MeZO on the device."""
    base = saved(place, torch.float32)
    whole = resident_model(base, torch.float32, place)
    mono = MonolithicMeZO(whole, lr=1e-2, zo_eps=1e-3)
    with Engine(
        open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3)), device=place.device, memory=memory_of(place, 1)
    ) as engine:
        losses = []
        for step in range(STEPS):
            batch = batch_of(step)
            on_device = {key: value.to(place.device) for key, value in batch.items()}
            losses.append((engine.step(batch, seed=step).losses, tuple(mono.step(on_device, step).losses)))
        theirs = {name: value.data for name, value in whole.named_parameters()}
        same, count = bits_equal(dict(engine.parameters_now()), theirs)
    return {"equal": same == count and all(ours == other for ours, other in losses), "tensors": [same, count]}


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


def check_rewards(place: Place) -> Result:
    """An answer that is generated at the members of a population: no block kept on the device, against all of them."""
    answers = []
    for kept in (0, 8):
        model = open_checkpoint(saved(place, torch.float32))
        method = ZerothOrder(
            EvolutionStrategies(lr=1e-2, zo_eps=1e-2, q=2),
            noise=PhiloxNoise(Distribution.GAUSSIAN),
            perturbation=LowRankPerturbation(rank=2),
        )
        with Engine(model, method, device=place.device, memory=memory_of(place, kept)) as engine:
            written, losses = [], []
            for at in engine.ask():
                written.append([list(tokens) for tokens in generate(engine, model, [[5, 6, 7]], max_new_tokens=6, at=at)])
                losses.append(float(sum((token or 0) / 512 for tokens in written[-1] for token in tokens)))
            answers.append([written, engine.tell(losses).projected_grads])
    return {"equal": answers[0] == answers[1], "answers": answers}


def check_two_runs(place: Place) -> Result:
    """Two adapters over one base, stepped together, against each alone."""
    base, made, alone = saved(place, torch.float32), {}, {}
    method = FirstOrder(partial(torch.optim.AdamW, lr=1e-2))

    def run(seed: int, engine: Engine) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            engine.step(batch_of(10 * seed + step))
        return {name: value.detach().clone() for name, value in engine.parameters.items()}

    def model_of(seed: int) -> Any:
        return open_checkpoint(base, adapter=Adapter(config=lora(), seed=seed))

    for seed in (1, 2):
        with Engine(model_of(seed), method, device=place.device, memory=memory_of(place, 0)) as engine:
            alone[seed] = run(seed, engine)
    with ExitStack() as opened:
        shared = opened.enter_context(SharedBase(open_checkpoint(base), device=place.device))
        engines = {seed: opened.enter_context(Engine(model_of(seed), method, shared=shared)) for seed in (1, 2)}
        made = shared.together({seed: partial(run, seed, engine) for seed, engine in engines.items()})
    counts = [bits_equal(made[seed], alone[seed]) for seed in (1, 2)]  # type: ignore[arg-type]
    return {"equal": all(same == count for same, count in counts), "tensors": counts}


@contextmanager
def timed(place: Place, spans: list[float]) -> Iterator[None]:
    """Seconds until the device has done what the context issued."""
    started = time.perf_counter()
    yield
    if place.device != "cpu":
        torch.cuda.synchronize()
    spans.append(time.perf_counter() - started)


def peak_bytes(place: Place) -> int:
    """The most memory that torch has allocated on the device since it was asked last."""
    if place.device == "cpu":
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def bench_lora(place: Place, *, geometry: str, gigabytes: float, nf4: bool = False) -> Result:
    """A step of a LoRA within so much device memory, against peft with the whole model in bfloat16 there, if it fits.

    The streamed model's files are sparse; the other one has random weights.
    """
    from families import small_config
    from make_checkpoint import geometries, make_checkpoint, make_sparse_coded

    path = place.folder / "base"
    if place.tiny:
        config: Any = small_config("qwen3_moe") if nf4 else config_of(place)
        path = saved(place, torch.bfloat16, config)
        if nf4:
            quantize(path, path := place.folder / "nf4", "nf4")
    else:
        config = geometries()[geometry]
        if nf4:
            make_sparse_coded(config, path, dtype=torch.bfloat16)
        else:
            make_checkpoint(config, path, dtype=torch.bfloat16, sparse=True)
        config = geometries()[geometry]
    rows, tokens = (2, 24) if place.tiny else (1, 512)
    batch = batch_of(0, rows, tokens, min(512, config.vocab_size))
    spans: dict[str, list[float]] = {"ours": [], "peft": []}
    make, memory = partial(torch.optim.AdamW, lr=1e-4), MemoryPolicy(activations=ROOM)
    if place.device != "cpu":
        memory = MemoryPolicy(device=f"{gigabytes}GB", activations="1GB", least_activations="256MB")
    with Engine(
        open_checkpoint(path, adapter=Adapter(config=lora())), FirstOrder(make), device=place.device, memory=memory
    ) as engine:
        for _ in range(STEPS):
            with timed(place, spans["ours"]):
                lanes = engine.step(batch).lanes
        moved = {lane.value: list(use) for lane, use in lanes.items()}
    ours = peak_bytes(place)
    try:
        with torch.device(place.device):
            whole: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        resident = with_adapter(whole.eval(), lora())
        optimizer = make([value for value in resident.parameters() if value.requires_grad])
        for _ in range(STEPS):
            with timed(place, spans["peft"]):
                resident(**{key: value.to(place.device) for key, value in batch.items()}).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    except torch.OutOfMemoryError:
        spans["peft"] = []
    theirs, step = peak_bytes(place), statistics.median(spans["ours"])
    ratios = {"upload / step": lanes[Lane.UPLOAD].busy_seconds / step if Lane.UPLOAD in lanes else None}
    if spans["peft"]:
        ratios |= {"time": step / statistics.median(spans["peft"]), "memory": ours / theirs if theirs else None}
    return {"seconds": spans, "peak_bytes": {"ours": ours, "peft": theirs}, "ratios": ratios, "lanes": moved}


def bench_overlap(place: Place) -> Result:
    """How much of the copies to the device torch.profiler sees while kernels run; its trace is kept beside the result."""
    config = config_of(place) if place.tiny else config_of(place, hidden_size=2048, intermediate_size=8192)
    cuda = [] if place.device == "cpu" else [torch.profiler.ProfilerActivity.CUDA]
    model, batch = open_checkpoint(saved(place, torch.float32, config)), batch_of(0, 1, 24 if place.tiny else 256)
    method = ZerothOrder(MeZOSGD(lr=1e-6, zo_eps=1e-3), noise=PhiloxNoise(Distribution.RADEMACHER))
    with Engine(model, method, device=place.device, memory=memory_of(place, 0)) as engine:
        engine.step(batch)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *cuda]) as profiler:
            engine.step(batch)
    trace = place.output / "overlap-trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if "dur" in event]

    def spans(kind: str, word: str = "") -> list[tuple[float, float]]:
        found = (event for event in events if event.get("cat") == kind and word in event["name"])
        return merged((float(event["ts"]), float(event["ts"] + event["dur"])) for event in found)

    kernels, copies = spans("kernel" if cuda else "cpu_op"), spans("gpu_memcpy", "HtoD")
    both = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in kernels for begin, stop in copies)
    totals = {"kernels": sum(end - start for start, end in kernels), "copies": sum(end - start for start, end in copies)}
    return {"microseconds": totals | {"both at once": both}, "trace": trace.name}


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Unite spans that overlap."""
    united: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((start, end))
    return united


def bench_mezo(place: Place, *, geometry: str, dtype: torch.dtype) -> Result:
    """A step of exact MeZO with no block kept on the device, against monolithic MeZO there, in turns."""
    from make_checkpoint import geometries, make_checkpoint

    path, config = place.folder / "base", config_of(place) if place.tiny else geometries()[geometry]
    if place.tiny:
        path, dtype = saved(place, torch.float32), torch.float32
    else:
        make_checkpoint(config, path, dtype=dtype, seed=0)
    rows, tokens = (1, 24) if place.tiny else (1, 2048)
    batch, spans = batch_of(0, rows, tokens), {"ours": list[float](), "monolithic": list[float]()}
    whole = resident_model(path, dtype, place)
    mono, on_device = MonolithicMeZO(whole, lr=1e-6, zo_eps=1e-3), {k: v.to(place.device) for k, v in batch.items()}
    method, same = ZerothOrder(MeZOSGD(lr=1e-6, zo_eps=1e-3)), True
    with Engine(open_checkpoint(path), method, device=place.device, memory=memory_of(place, 0, 1 << 30)) as engine:
        for step in range(STEPS + 1):
            with timed(place, spans["ours"]):
                ours = engine.step(batch, seed=step).losses
            with timed(place, spans["monolithic"]):
                same &= ours == tuple(mono.step(on_device, step).losses)
    return {"equal": same, "seconds": {side: times[1:] for side, times in spans.items()}}


def bench_read(place: Place) -> Result:
    """Bytes a second from a file to the device through a ring of pinned buckets, against reading the file alone."""
    from zo2core import SegmentStore
    from zo2core.devices import choose_device
    from zo2core.schedulers import OverlappedScheduler
    from zo2core.sources.loader import laid_out_as_on_disk

    config = config_of(place) if place.tiny else config_of(place, hidden_size=4096, intermediate_size=16384)
    model, spans = open_checkpoint(saved(place, torch.float32, config)), list[float]()
    device = choose_device(place.device)
    layouts = laid_out_as_on_disk(model.layouts, model.weights)
    source = SegmentStore(model.weights, layouts, device.host_memory, buckets=3)

    class Look:
        """A visitor that only looks."""

        def visit(self, index: int, store: Any, version: int, commit: Any) -> None:
            commit(version)

        def replay(self, index: int, store: Any, version: int) -> int:
            return version

    scheduler = OverlappedScheduler(source, device)
    for _ in range(STEPS):
        with timed(place, spans):
            scheduler.sweep(Look(), range(len(layouts)))
    nbytes = sum(layout.nbytes for layout in layouts if not layout.resident)
    scheduler.release_all()
    for part in (source, device, model.weights):
        part.close()
    return {"bytes": nbytes, "seconds": {"read": spans}, "bytes_a_second": nbytes / statistics.median(spans)}


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
JOBS: Mapping[str, Job] = {
    "check: mezo": Job(40, check_mezo),
    "check: lora, float32, graphs kept": Job(40, partial(check_lora, dtype=FLOAT32, room=ROOM, kept=0)),
    "check: lora, bfloat16, run anew": Job(40, partial(check_lora, dtype=BFLOAT16, room=1, kept=4)),
    "check: lora, nf4": Job(40, partial(check_lora, dtype=BFLOAT16, room=ROOM, kept=0, quantized="nf4")),
    "check: lora, mxfp4": Job(40, partial(check_lora, dtype=BFLOAT16, room=ROOM, kept=0, quantized="mxfp4")),
    "check: all parameters, graphs kept": Job(40, partial(check_full, room=ROOM)),
    "check: all parameters, run anew": Job(40, partial(check_full, room=1)),
    "check: low rank": Job(40, partial(check_forwards, dtype=BFLOAT16, perturbation=LowRankPerturbation(rank=2))),
    "check: 2 queries, float32": Job(40, partial(check_forwards, dtype=FLOAT32)),
    "check: gguf": Job(30, check_gguf),
    "check: rewards": Job(40, check_rewards),
    "check: two runs over one base": Job(40, check_two_runs),
    "bench: mezo, opt-1.3b, float16": Job(120, partial(bench_mezo, geometry="opt-1.3b", dtype=torch.float16)),
    "bench: lora, opt-13b within 8 GB": Job(120, partial(bench_lora, geometry="opt-13b", gigabytes=8)),
    "bench: lora, qwen3-30b-a3b nf4 within 8 GB": Job(
        180, partial(bench_lora, geometry="qwen3-30b-a3b", gigabytes=8, nf4=True)
    ),
    "bench: overlap": Job(60, bench_overlap),
    "bench: disk to device": Job(60, bench_read),
}


def machine_of(device: str) -> dict[str, Any]:
    """The machine, in words."""
    name = platform.processor() if device == "cpu" else torch.cuda.get_device_name(0)
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}


def run_job(name: str, place: Place) -> Result:
    """A job's result; an error is a result, too."""
    started = time.perf_counter()
    try:
        result = JOBS[name].run(place)
    except Exception:
        result = {"equal": False, "error": traceback.format_exc(limit=4)}
    return {"job": name, "machine": machine_of(place.device), "wall_seconds": time.perf_counter() - started, **result}


def file_of(name: str) -> str:
    """The name of a job's result."""
    return "".join(letter if letter.isalnum() else "-" for letter in name) + ".json"


def main() -> int:
    """Run the command line."""
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
                result = run_job(name, Place(options.device, options.tiny, Path(folder), options.output))
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
