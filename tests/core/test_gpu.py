"""What only a GPU can show. Skipped where there is none."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from engines import assert_same_outcome, outcome, zeroth_order
from models import CONFIGS, make_batch, save_model, small_config
from parity import Plan, Storage, assert_parity, assert_same_bits, assert_same_weights
from runs import small_run
from transformers import AutoModelForCausalLM
from whole_loops import LowBitMeZO, StackedLoop

from zo2adapters import MonolithicMeZO, Precision, generate, open_checkpoint
from zo2adapters.cli import main
from zo2core import (
    CudaDevice,
    Distribution,
    Engine,
    HostPlan,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    MultiQueryRGE,
    PhiloxNoise,
    ZerothOrder,
)
from zo2core.encodings.decoding import decode
from zo2core.encodings.forms import GGUF_BLOCKS, GGUFRows
from zo2core.errors import DeviceError
from zo2core.estimators import factors as factor_store
from zo2core.io.direct_file import anonymous_memory
from zo2core.kernels import Draw, dispatch, reference
from zo2core.kernels.low_bit import FP8
from zo2core.planning.memory import DevicePlan, Replay
from zo2core.protocols import Device
from zo2core.types import Descend, ParameterSpec, Perturb, Program

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BLOCKS = 4


class OnGPU(Storage):
    """As ``Storage``, on the GPU."""

    def device(self) -> Device:
        return CudaDevice()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(
        tmp_path / "base", small_config("llama", num_hidden_layers=BLOCKS), torch.float32
    )


def whole_on_gpu(base: Path, dtype: torch.dtype | str = "auto") -> Any:
    whole: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return whole.to("cuda")


def on_gpu(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.to("cuda") for key, value in batch.items()}


def assert_parity_on_gpu(base: Path, plan: Plan, storage: OnGPU, run: Path) -> None:
    options: dict[str, Any] = (
        {"precision": "mixed", "dtype": plan.autocast, "loss_chunk": None} if plan.autocast else {}
    )

    def make() -> Engine:
        return storage.engine(open_checkpoint(base, **options), plan, run)

    whole = whole_on_gpu(base, torch.float32 if plan.autocast else "auto")
    assert_parity(make, whole, plan, on_gpu(make_batch(40, [7, 4]))).close()


@pytest.mark.parametrize("activations_wait", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("distribution", [None, *Distribution])
def test_the_trajectory_is_the_monolithic_loops(
    distribution: Distribution | None,
    in_place: bool,
    activations_wait: bool,
    base: Path,
    tmp_path: Path,
) -> None:
    between = ["nothing", "evaluate", "flush", "reopen", "nothing"]
    plan = Plan(1e-2, 1e-3, 0.1, in_place, list(range(5)), between, 2, distribution)
    storage = OnGPU(3, 2, False, behind_copies=True, activations_wait=activations_wait)
    assert_parity_on_gpu(base, plan, storage, tmp_path / "run")


STORAGES = {
    "resident, serial": OnGPU(None, None, False, overlap=False, behind_copies=True),
    "resident, overlapped": OnGPU(None, None, False, behind_copies=True),
    "streamed, serial": OnGPU(2, 1, False, overlap=False, behind_copies=True),
    "streamed, one block kept": OnGPU(3, 2, False, kept=1, behind_copies=True),
    "streamed, activations wait": OnGPU(2, None, False, behind_copies=True, activations_wait=True),
}


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_adapter_precision_and_storage(
    model_type: str,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    storage: OnGPU,
    tmp_path: Path,
) -> None:
    base = save_model(tmp_path / "base", small_config(model_type, num_hidden_layers=3), dtype)
    between = ["nothing", "evaluate", "look", "reopen", "flush"]
    plan = Plan(
        1e-2, 1e-3, 0.1, True, list(range(5)), between, 0, Distribution.GAUSSIAN, autocast=autocast
    )
    assert_parity_on_gpu(base, plan, storage, tmp_path / "run")


def test_fzoo_is_its_papers_loop(base: Path, tmp_path: Path) -> None:
    noise = Distribution.RADEMACHER
    plan = Plan(
        1e-3, 1e-2, 0.0, False, list(range(4)), ["nothing", "look"] * 2, 3, noise, name="fzoo"
    )
    assert_parity_on_gpu(base, plan, OnGPU(3, 2, False, behind_copies=True), tmp_path / "run")


@pytest.mark.parametrize("beside_up_to", [0.05, 10.0], ids=["formed", "beside"])
@pytest.mark.parametrize("buckets", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_directions_beside_the_activations_are_the_stacked_loops(
    model_type: str, dtype: torch.dtype, buckets: int | None, beside_up_to: float, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config(model_type, num_hidden_layers=BLOCKS), dtype)
    batch, distribution = on_gpu(make_batch(40, [7, 4])), Distribution.GAUSSIAN
    loop = StackedLoop(whole_on_gpu(base), 2, 2, distribution)
    with (
        patch.object(factor_store, "BESIDE_UP_TO", beside_up_to),
        Engine(
            open_checkpoint(base, loss_chunk=None),
            ZerothOrder(
                MultiQueryRGE(lr=1e-2, zo_eps=1e-2, perturb_in_place=False, q=2),
                noise=PhiloxNoise(distribution),
                perturbation=LowRankPerturbation(rank=2, period=2),
            ),
            device="cuda",
            memory=MemoryPolicy(
                host=HostPlan((), 1 << 40, buckets, keep_noise=False),
                device=DevicePlan((), 1 << 40, 1, 1 << 24),
            ),
        ) as engine,
    ):
        for _ in range(5):
            seeds = list(dict.fromkeys(evaluation.seed for evaluation in engine.ask()))
            assert list(engine.step(batch).losses) == loop.step(batch, *seeds)
        weights = loop.weights()
        assert_same_weights(engine.parameters_now(), weights.items())


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("replay", ["auto", "host"])
@pytest.mark.parametrize("transfer_dtype", [None, torch.bfloat16, torch.float16, FP8], ids=str)
def test_carried_weights_are_those_of_the_monolithic_loop(
    transfer_dtype: torch.dtype | None, replay: Replay, kept: int, tmp_path: Path
) -> None:
    base = save_model(
        tmp_path / "base", small_config("llama", num_hidden_layers=BLOCKS), torch.bfloat16
    )
    numbers: dict[str, Any] = {"lr": 1e-2, "zo_eps": 1e-2}
    batch, distribution = on_gpu(make_batch(40, [7, 4])), Distribution.RADEMACHER
    whole = (MonolithicMeZO if transfer_dtype is None else LowBitMeZO)(
        whole_on_gpu(base, torch.float32),
        **numbers,
        draw=lambda z, seed, place: dispatch.fill(z, distribution, seed, place),
        autocast=torch.bfloat16,
    )
    if transfer_dtype is not None:
        assert isinstance(whole, LowBitMeZO)
        whole.transfer_dtype = transfer_dtype
    precision = Precision(
        stored=torch.float32, computed=torch.bfloat16, transfer_dtype=transfer_dtype
    )
    memory = MemoryPolicy(device=DevicePlan((), 1 << 40, kept, 1 << 24))
    with zeroth_order(
        open_checkpoint(base, precision=precision, loss_chunk=None),
        MeZOSGD(**numbers),
        noise=PhiloxNoise(distribution),
        device="cuda",
        replay=replay,
        memory=memory,
    ) as engine:
        for step in range(3):
            assert engine.step(batch, seed=step).losses == whole.step(batch, step).losses
        own = dict(whole.model.named_parameters())
        for name, tensor in engine.parameters_now():
            assert_same_bits(name, tensor.cpu(), own[name].data.cpu())


@pytest.mark.parametrize("transfer_dtype", [torch.bfloat16, torch.float16, FP8], ids=str)
def test_what_comes_back_rounded_does_not_depend_on_who_keeps_a_block(
    transfer_dtype: torch.dtype, tmp_path: Path
) -> None:
    base = save_model(
        tmp_path / "base", small_config("llama", num_hidden_layers=BLOCKS), torch.bfloat16
    )
    precision = Precision(
        stored=torch.float32,
        computed=torch.bfloat16,
        transfer_dtype=transfer_dtype,
        transfer_back=True,
    )
    method = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2), noise=PhiloxNoise(Distribution.RADEMACHER))
    policies = [MemoryPolicy(device=DevicePlan((), 1 << 40, kept, 1 << 24)) for kept in (0, 2)]
    engines = (
        Engine(open_checkpoint(base, precision=precision), method, device="cuda", memory=own)
        for own in policies
    )
    assert_same_outcome(*(outcome(engine, [make_batch(40, [7, 4])] * 3) for engine in engines))


def test_tokens_are_those_of_transformers_own_generate(base: Path) -> None:
    prompt = torch.tensor([[3, 9, 4]])
    whole = whole_on_gpu(base)
    theirs = whole.generate(
        prompt.to("cuda"), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    model = open_checkpoint(base)
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3)), device="cuda") as engine:
        ours = [token for (token,) in generate(engine, model, prompt.tolist(), max_new_tokens=6)]
    assert ours == theirs[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    "more",
    [[], ["--precision", "mixed", "--transfer-dtype", "bfloat16", "--dtype", "bfloat16"]],
    ids=str,
)
def test_a_run_resumed_on_the_gpu_ends_as_the_undisturbed_one(
    more: list[str], tmp_path: Path
) -> None:
    options = small_run(tmp_path)
    train = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        str(options.data),
        "--lr",
        "1e-2",
        "--device",
        "cuda",
        *more,
    ]
    main([*train, "--output", str(tmp_path / "whole"), "--steps", "6"])
    main([*train, "--output", str(tmp_path / "cut"), "--steps", "3"])
    main(["train", "--resume", str(tmp_path / "cut"), "--steps", "6"])
    for run in ("whole", "cut"):
        main(["export", "--run", str(tmp_path / run), "--output", str(tmp_path / f"{run}-model")])
    files = [
        (tmp_path / f"{run}-model" / "model.safetensors").read_bytes() for run in ("whole", "cut")
    ]
    assert files[0] == files[1]


@contextmanager
def watched(engine: Engine, seen: list[int]) -> Iterator[None]:
    """Let a sweep fail that makes the host wait; note what torch has reserved before and after
    each.
    """
    sweep = engine._run.segments.scheduler.sweep

    def strict(*arguments: Any) -> None:
        seen.append(torch.cuda.memory_stats()["segment.all.allocated"])
        try:
            with warnings.catch_warnings(action="ignore"):
                # torch says that the mode does not yet see all waiting
                torch.cuda.set_sync_debug_mode("error")
            sweep(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen.append(torch.cuda.memory_stats()["segment.all.allocated"])

    with patch.object(engine._run.segments.scheduler, "sweep", strict):
        yield


@pytest.mark.parametrize("least", [None, 1], ids=["activations stay", "activations wait"])
@pytest.mark.parametrize("lengths", [[7, 7], [7, 4]], ids=["full", "padded"])
def test_a_sweep_neither_waits_nor_allocates(
    lengths: list[int], least: int | None, base: Path
) -> None:
    seen: list[int] = []
    with zeroth_order(
        open_checkpoint(base),
        MeZOSGD(lr=1e-3, zo_eps=1e-3),
        noise=PhiloxNoise(Distribution.GAUSSIAN),
        device="cuda",
        memory=MemoryPolicy(activations=1 if least else 2**28, least_activations=least),
    ) as engine:
        batch = make_batch(40, lengths)
        for _ in range(3):  # kernels are compiled, and the allocator's cache is filled
            engine.step(batch)
        with watched(engine, seen):
            for _ in range(3):
                engine.step(batch)
    assert len(set(seen)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("distribution", Distribution)
def test_the_kernel_gives_the_references_bits(
    distribution: Distribution, dtype: torch.dtype
) -> None:
    numel, start, seed = 100_003, 777, 2**40 + 3
    moves = (
        Perturb(0, 1.0, 1e-3),
        Perturb(1, -2.0, 1e-3),
        Descend(0, 0.3, 1e-2, 0.1),
        Descend(1, -0.7, 1e-2, 0.0),
    )
    program = Program((seed, 5), moves, then=Perturb(1, 1.0, 1e-3))
    theta = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for device in ("cpu", "cuda"):
        weights, out = theta.to(device, copy=True), torch.empty(numel, dtype=dtype, device=device)
        dispatch.apply(weights, program, Draw(distribution, 3, start), out=out)
        found.append((weights.cpu(), out.cpu()))
    z, there = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype, device="cuda")
    reference.fill(z, distribution, seed, 3, 0)
    dispatch.fill(there, distribution, seed, 3, 0)
    assert torch.equal(there.cpu(), z)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_the_kernel_takes_any_number_as_a_parameters_place() -> None:
    theta = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    for number in (0, 1, 16, 2**31 + 1):
        # Triton treats 1 and multiples of 16 by themselves unless told otherwise
        program, results = Program((number,), (Perturb(0, 1.0, 1e-3),), then=None), []
        for device in ("cpu", "cuda"):
            weights, z = theta.to(device, copy=True), torch.empty(3000, device=device)
            dispatch.apply(weights, program, Draw(Distribution.GAUSSIAN, min(number, 99), number))
            dispatch.fill(z, Distribution.GAUSSIAN, number, min(number, 99), number)
            results.append((weights.cpu(), z.cpu()))
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs), number


def test_memory_is_locked_again_where_a_device_was_left_open() -> None:
    for _ in range(20):
        memory = CudaDevice().host_memory(1 << 20)  # the device is gone, the memory is not
        memory.fill_(1)
        del memory
    device = CudaDevice()
    device.host_memory(1 << 20)
    device.close()


def test_memory_that_cannot_be_locked_is_refused_and_nothing_else_fails() -> None:
    device, pages = CudaDevice(), anonymous_memory(1 << 20)
    with patch("zo2core.schedulers.devices.anonymous_memory", lambda nbytes: pages):
        device.host_memory(1 << 20)
        with pytest.raises(DeviceError, match="cudaHostRegister failed"):
            device.host_memory(1 << 20)
    assert torch.ones(3, device="cuda").sum().item() == 3
    device.close()


def test_losses_are_finite_and_memory_is_given_back(base: Path) -> None:
    before = torch.cuda.memory_allocated()
    engine = Engine(
        open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3)), device="cuda"
    )
    mono = MonolithicMeZO(whole_on_gpu(base), lr=1e-3, zo_eps=1e-3)
    batch = make_batch(40, [5])
    ours = engine.step(batch, seed=3)
    theirs = mono.step({key: value.to("cuda") for key, value in batch.items()}, 3)
    assert ours.losses == theirs.losses
    assert ours.bound_seconds > 0
    engine.close()
    del engine, mono
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0"])
def test_blocks_of_gguf_files_have_the_bits_of_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    codes = np.random.default_rng(0).integers(
        0, 256, (256, GGUF_BLOCKS[name].nbytes), dtype=np.uint8
    )
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(
            np.array(gguf.dequantize(codes, gguf.GGMLQuantizationType[name]))
        ).view(64, -1)
    spec = ParameterSpec(
        "weight", expected.shape, torch.float32, 0, decays=False, encoding=GGUFRows(name)
    )
    out = torch.empty(expected.shape, dtype=torch.float32, device="cuda")
    decode(spec, torch.from_numpy(codes).view(-1).to("cuda"), out)
    nan = torch.isnan(expected)
    assert torch.equal(out.cpu()[~nan], expected[~nan])
