"""What is carried to a device: less than is stored, the same bits wherever it is computed."""

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from command_lines import refusal
from engines import assert_equal, behind_copies, memory, outcome, weights, zeroth_order
from hypothesis import given, settings
from hypothesis import strategies as st
from models import save_model, small_config
from parity import BETWEEN, assert_same_bits, go_between
from runs import finish, small_run
from toy import ToyBlockModel, make_toy
from transformers import AutoModelForCausalLM
from whole_loops import LowBitMeZO, through

from zo2adapters import Precision, open_checkpoint
from zo2adapters.cli import main
from zo2adapters.models.architecture import TRANSFER_DTYPES
from zo2adapters.trainers.options import RunModelOptions
from zo2core import (
    CustomSource,
    Distribution,
    Engine,
    EngineOptions,
    HostDevice,
    Journal,
    MeZOSGD,
    PhiloxNoise,
    SegmentStore,
    SequentialNoise,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.errors import JournalError, OptionError
from zo2core.kernels import dispatch, fill, native
from zo2core.kernels.low_bit import FP8, decode, encode, low_bit_layout
from zo2core.protocols import ZOEstimator
from zo2core.sources.low_bit import LowBitSource
from zo2core.sweep.perturbers import CounterPerturber, Operation, WorkBuffer, divide_by_launch
from zo2core.types import Lane, ParameterSpec, Perturb, Program

VOCAB, WIDTH, LAYERS = 50, 16, 5
DTYPES = [torch.bfloat16, torch.float16, FP8]
BATCH = {
    "input_ids": torch.arange(12).view(2, 6) % VOCAB,
    "labels": torch.arange(12).view(2, 6) % VOCAB,
}
NOISE, MEZO = PhiloxNoise(Distribution.RADEMACHER), MeZOSGD(lr=1e-2, zo_eps=1e-2)


def carried_toy(file: Path, dtype: torch.dtype | None, *, back: bool) -> ToyBlockModel:
    """A toy whose layers' matrices are carried in a dtype."""
    model = ToyBlockModel(VOCAB, WIDTH, LAYERS, tied=True, dtype=torch.float32, file=file)

    def carry(spec: ParameterSpec) -> ParameterSpec:
        return (
            replace(spec, transfer_dtype=dtype, transfer_back=back)
            if len(spec.shape) == 2
            else spec
        )

    embedding, *blocks, head = model.layouts
    model.layouts = (
        embedding,
        *(
            replace(block, parameters=tuple(carry(spec) for spec in block.parameters))
            for block in blocks
        ),
        head,
    )
    return model


def low_bit_loop(
    whole: Any,
    dtype: torch.dtype,
    distribution: Distribution,
    *,
    back: bool = False,
    **options: Any,
) -> LowBitMeZO:
    loop = LowBitMeZO(
        whole, **options, draw=lambda z, seed, place: fill(z, distribution, seed, place)
    )
    loop.transfer_dtype, loop.transfer_back = dtype, back
    return loop


@contextmanager
def on_device(
    model: ToyBlockModel,
    tmp: Path,
    estimator: ZOEstimator = MEZO,
    *,
    kept: int = 0,
    buckets: int | None = None,
    **options: Any,
) -> Iterator[Engine]:
    policy = memory(buckets, kept=kept if options.get("overlap", True) else None, budget=1 << 40)
    write_back = None if buckets is None else WriteBackPolicy(directory=tmp / "scratch", every=1)
    told = {"noise": NOISE, "memory": policy, "write_back": write_back, **options}
    with (
        behind_copies(per_byte=1e-7) as device,
        zeroth_order(model, estimator, device=device, **told) as engine,
    ):
        yield engine


@given(
    dtype=st.sampled_from(DTYPES),
    back=st.booleans(),
    numbers=st.fixed_dictionaries(
        {"weight_decay": st.sampled_from([0.0, 0.1]), "perturb_in_place": st.booleans()}
    ),
    distribution=st.sampled_from(list(Distribution)),
    options=st.fixed_dictionaries(
        {
            "kept": st.integers(0, LAYERS),
            "buckets": st.sampled_from([None, 2, 3, 4]),
            "replay": st.sampled_from(["auto", "host"]),
            "overlap": st.booleans(),
        }
    ),
    between=st.lists(st.sampled_from(BETWEEN), min_size=3, max_size=3),
)
def test_carried_weights_are_those_of_the_monolithic_loop(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    back: bool,
    numbers: dict[str, Any],
    distribution: Distribution,
    options: dict[str, Any],
    between: list[str],
) -> None:
    tmp = tmp_path_factory.mktemp("carrying")
    numbers |= {"lr": 1e-2, "zo_eps": 1e-2}
    toy = make_toy(VOCAB, WIDTH, LAYERS, tied=True, dtype=torch.float32)
    own = low_bit_loop(toy, dtype, distribution, back=back, **numbers)
    options |= {"kept": options["kept"] if options["overlap"] else 0}
    options |= {"noise": PhiloxNoise(distribution), "journal": tmp / "journal"}

    def opened() -> Engine:
        return stack.enter_context(
            on_device(
                carried_toy(tmp / "base", dtype, back=back), tmp, MeZOSGD(**numbers), **options
            )
        )

    with ExitStack() as stack:
        engine = opened()
        for step, what in enumerate(between):
            assert engine.step(BATCH, seed=step + 7).losses == own.step(BATCH, step + 7).losses
            engine = go_between(what, engine, opened, BATCH, lambda: own.carried_loss(BATCH))
        assert_equal(weights(engine), dict(toy.named_parameters()))


def test_what_was_made_ready_is_given_up_before_a_block_is_looked_at(tmp_path: Path) -> None:
    model = carried_toy(tmp_path / "base", torch.bfloat16, back=True)
    device = HostDevice()
    stored = SegmentStore(model.weights, model.layouts, device.host_memory)
    source = LowBitSource(
        stored, (), device.host_memory, lambda index, store, version: version, comes_back=True
    )
    with (
        patch.object(stored, "acquire", wraps=stored.acquire) as acquire,
        closing(stored),
        closing(source),
    ):
        source.prefetch([1, 2, 3])
        with source.without_prefetch(), source.stored(2) as bucket:
            assert source.prefetch([1, 2, 3]) == 0
            assert bucket.segment == 2
        assert sorted(call.args[0] for call in acquire.mock_calls) == [1, 2, 2, 3]
        assert source.acquire(2).segment == 2  # made ready anew
        assert acquire.mock_calls[-1].args == (2,)


def flush_twice(engine: Engine) -> None:
    engine.flush()
    engine.flush()


def test_what_came_back_and_could_not_be_widened_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, outcomes = count(1), []

    def broken(*arguments: Any) -> None:
        if threading.current_thread().name.startswith("zo2-low-bit") and next(calls) == 1:
            arguments[-1].fill_(7.0)
            raise OSError("broken")
        decode(*arguments)

    for fails in (False, True):
        model = carried_toy(tmp_path / "base", torch.bfloat16, back=True)
        with on_device(model, tmp_path / str(fails)) as engine:
            engine.step(BATCH)
            if fails:
                monkeypatch.setattr("zo2core.sources.low_bit.decode", broken)
                with pytest.raises(OSError, match="broken"):
                    # told when the next block is asked for
                    flush_twice(engine)
                monkeypatch.undo()
            engine.step(BATCH)
            outcomes.append(weights(engine))
    assert_equal(*outcomes)


@pytest.mark.parametrize(
    ("dtype", "back", "replay", "lands"),
    [
        (torch.bfloat16, False, "host", True),
        (FP8, False, "host", True),
        (torch.bfloat16, True, "host", False),
        (torch.bfloat16, True, "device", False),
    ],
)
def test_updates_land_in_what_is_kept_and_not_in_what_is_carried(
    dtype: torch.dtype, back: bool, replay: Literal["host", "device"], lands: bool, tmp_path: Path
) -> None:
    """Updates of about 1e-5 change weights of about 0.4 in float32, and none in bfloat16; most
    weights are the blocks'.
    """
    model, estimator = (
        carried_toy(tmp_path / "base", dtype, back=back),
        MeZOSGD(lr=1e-5, zo_eps=1e-2, perturb_in_place=False),
    )
    with on_device(model, tmp_path, estimator, replay=replay) as engine:
        share_applied = engine.step(BATCH).share_applied
    assert share_applied is not None
    assert (share_applied > 0.9) if lands else (share_applied < 0.7)


@pytest.mark.parametrize(
    ("dtype", "back", "replay", "up", "down"),
    [
        (None, False, "device", 4, 4),
        (None, False, "host", 4, 0),
        (torch.bfloat16, False, "host", 2, 0),
        (torch.bfloat16, True, "device", 2, 2),
        (FP8, False, "host", 1, 0),
        (FP8, True, "device", 1, 1),
    ],
)
def test_bytes_each_way(
    dtype: torch.dtype | None,
    back: bool,
    replay: Literal["host", "device"],
    up: int,
    down: int,
    tmp_path: Path,
) -> None:
    model = carried_toy(tmp_path / "base", dtype, back=back)
    with on_device(model, tmp_path, replay=replay) as engine:
        steps = [engine.step(BATCH) for _ in range(3)]
    blocks = [layout for layout in model.layouts if not layout.resident]
    matrices = sum(
        spec.numel for block in blocks for spec in block.parameters if len(spec.shape) == 2
    )
    transfer_dtype = sum(low_bit_layout(block).nbytes for block in blocks)
    residents = sum(layout.nbytes for layout in model.layouts if layout.resident)  # once, to stay
    # vectors, carried as they are stored
    rest = sum(block.nbytes for block in blocks) - 4 * matrices
    up_bytes, down_bytes = (
        sum(step.lanes[lane].nbytes for step in steps) for lane in (Lane.UPLOAD, Lane.OFFLOAD)
    )
    # Two blocks may have come in for the next step, and the last one may still be on its way.
    assert 0 <= up_bytes - 3 * transfer_dtype - residents <= 2 * transfer_dtype // LAYERS
    assert 0 <= (2 * transfer_dtype if down else 0) - down_bytes <= transfer_dtype // LAYERS
    assert up * matrices <= transfer_dtype <= up * matrices + rest + LAYERS * 4 * 64


def test_a_row_of_8_bits_keeps_its_largest_weight_and_zeros() -> None:
    theta = torch.tensor([[0.5, -7.0, 1e-3], [0.0, 0.0, 0.0], [1e-30, 2e-30, -3e-30]])
    transfer_dtype, scales, out = torch.empty(9, dtype=FP8), torch.empty(3), torch.empty(9)
    encode(theta.flatten(), transfer_dtype, scales)
    decode(transfer_dtype, scales, out)
    assert_same_bits("rows", out.view(3, 3), through(theta, FP8))
    assert out[1] == pytest.approx(-7.0, rel=1e-6)
    assert out[3:6].tolist() == [0.0, 0.0, 0.0]
    assert out[8] == pytest.approx(-3e-30, rel=0.07)
    again, same_scales = torch.empty(9, dtype=FP8), torch.empty(3)
    encode(out, again, same_scales)
    decode(again, same_scales, theta.flatten())
    assert_same_bits("carried twice", theta, out.view(3, 3))


REFUSED: dict[str, tuple[torch.dtype | None, bool, dict[str, Any], str]] = {
    "replay on a host that is the device": (None, False, {"replay": "host"}, "replay"),
    "an unknown replay": (None, True, {"replay": "nobody"}, "replay"),
    "replay on the host of noise that only torch draws": (
        None,
        True,
        {"replay": "host", "noise": None},
        "noise",
    ),
    "such noise behind a bus": (torch.bfloat16, True, {"noise": None}, "noise"),
    "such noise": (torch.bfloat16, False, {"noise": None}, "noise"),
    "replay on the device": (torch.bfloat16, True, {"replay": "device"}, "replay"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_heeded_is_refused(case: str, tmp_path: Path) -> None:
    dtype, on_bus, options, said = REFUSED[case]
    model = carried_toy(tmp_path / "base", dtype, back=False)
    with behind_copies() as bus, pytest.raises(OptionError, match=said):
        zeroth_order(model, MEZO, device=bus if on_bus else "cpu", **{"noise": NOISE, **options})
    if case == "such noise":  # of parts that are passed as well
        device, method = HostDevice(), ZerothOrder(MEZO, noise=SequentialNoise(model.layouts))
        source = SegmentStore(model.weights, model.layouts, device.host_memory)
        with closing(source), pytest.raises(OptionError, match=said):
            Engine(model, method, device=device, options=EngineOptions(source=CustomSource(source)))


def test_a_journal_knows_what_was_carried(tmp_path: Path) -> None:
    model = carried_toy(tmp_path / "base", torch.bfloat16, back=False)
    outcome(Engine(model, ZerothOrder(MEZO, noise=NOISE), journal=tmp_path / "journal"), [BATCH])
    for dtype, back in ((None, False), (torch.float16, False), (torch.bfloat16, True)):
        with pytest.raises(JournalError, match="parameters"):
            Engine(carried_toy(tmp_path / "base", dtype, back=back), journal=tmp_path / "journal")


@pytest.mark.parametrize(
    ("fails", "back"), [("read", False), ("replay", False), ("ahead", False), ("read", True)]
)
def test_a_failure_on_the_carrying_thread_is_raised_and_the_step_can_be_repeated(
    fails: str, back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(interrupt: Callable[[Engine], None]) -> dict[str, torch.Tensor]:
        model, replay = (
            carried_toy(tmp_path / "base", torch.bfloat16, back=back),
            "auto" if back else "host",
        )
        with on_device(model, tmp_path / fails, kept=1, buckets=4, replay=replay) as engine:
            engine.step(BATCH)
            interrupt(engine)
            weights(engine)  # gives up what was made ready for the step that failed
            engine.step(BATCH)
            return weights(engine)

    def break_once(engine: Engine) -> None:
        owner: Any = SegmentStore if fails == "read" else CounterPerturber
        name = "acquire" if fails == "read" else "replay"
        intact, calls = getattr(owner, name), count(1)

        def broken(self: Any, index: int, *arguments: Any) -> Any:
            is_low_bit = threading.current_thread().name.startswith("zo2-low-bit") and index == 4
            if is_low_bit and (next(calls) == 1 or fails != "ahead"):
                raise OSError("broken once")
            return intact(self, index, *arguments)

        monkeypatch.setattr(owner, name, broken)
        if fails == "ahead":  # nobody needs it yet: it is done again
            engine.flush()
            assert next(calls) == 3
        else:
            with pytest.raises(OSError, match="broken once"):
                engine.step(BATCH)
        monkeypatch.undo()

    undisturbed = run(lambda engine: None)
    shutil.rmtree(tmp_path / fails, ignore_errors=True)
    assert_equal(run(break_once), undisturbed)


@given(data=st.data())
@settings(max_examples=10)
def test_models_are_monolithic_mezo_at_carried_weights(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw, base = data.draw, tmp_path_factory.mktemp("base") / "model"
    dtype, computed = (
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([None, torch.bfloat16, torch.float16])),
    )
    where, kept = draw(st.sampled_from(["cpu", "bus"])), draw(st.integers(0, 2))
    save_model(base, small_config(draw(st.sampled_from(["opt", "llama", "qwen2"]))), torch.bfloat16)
    numbers: dict[str, Any] = {"lr": 1e-2, "zo_eps": 1e-2, "perturb_in_place": draw(st.booleans())}
    batch = {name: tokens % 20 for name, tokens in BATCH.items()}
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loop = low_bit_loop(whole, dtype, Distribution.RADEMACHER, **numbers, autocast=computed)
    precision = Precision(stored=torch.float32, computed=computed, transfer_dtype=dtype)
    model = open_checkpoint(base, precision=precision, loss_chunk=None)
    with behind_copies(per_byte=1e-7) as device:
        options: Any = (
            {"device": device, "memory": memory(kept=kept, budget=1 << 40)}
            if where == "bus"
            else {}
        )
        with zeroth_order(model, MeZOSGD(**numbers), noise=NOISE, **options) as engine:
            for step in range(3):
                assert engine.step(batch, seed=step).losses == loop.step(batch, step).losses
            assert_equal(weights(engine), dict(whole.named_parameters()))


def test_a_command_line_carries_and_its_run_keeps_it(tmp_path: Path) -> None:
    options = small_run(
        tmp_path, model_options=RunModelOptions(precision="mixed", transfer_dtype="bfloat16")
    )
    stored = replace(
        options, output=tmp_path / "stored", model_options=RunModelOptions(precision="mixed")
    )
    finish(options)
    finish(stored)
    carried, plain = (Journal(own.output / "journal.jsonl") for own in (options, stored))
    assert carried.header["model"]["carried"] == "bfloat16"  # type: ignore[index]
    assert [update.losses for update in carried.updates] != [
        update.losses for update in plain.updates
    ]
    main(["export", "--run", str(options.output), "--output", str(tmp_path / "again")])
    weights = [
        directory / "model.safetensors"
        for directory in (options.output / "model", tmp_path / "again")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert "bfloat16, as in the run" in refusal(
        "evaluate",
        "--run",
        str(options.output),
        "--data",
        str(options.data),
        "--precision",
        "mixed",
        "--transfer-dtype",
        "float16",
    )


def test_a_plan_says_what_travels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = small_run(tmp_path)
    plan = [
        "plan",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--precision",
        "mixed",
        "--sequence-length",
        "8",
        "--json",
    ]
    moved: dict[str, tuple[int, int]] = {}
    for transfer_dtype in TRANSFER_DTYPES:
        main(
            [
                *plan,
                "--precision",
                "mixed",
                "--transfer-dtype",
                f"{transfer_dtype}",
                "--device-memory",
                "30000B",
                "--micro-batch-size",
                "1",
            ]
        )
        planned = json.loads(capsys.readouterr().out)
        moved[transfer_dtype] = planned["moved_bytes"], planned["returned_bytes"]
    there, back = zip(*moved.values(), strict=True)
    assert there[0] > there[1] == there[2] > there[3] == there[6]
    assert back == (there[0], 0, 0, 0, *there[4:])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--precision", "mixed", "--transfer-dtype", "float8", "--method", "mezo"],
            "with --method mezo",
        ),
        (
            ["--precision", "exact", "--transfer-dtype", "float16", "--dtype", "bfloat16"],
            "precision.transfer_dtype",
        ),
    ],
)
def test_options_that_do_not_go_together_are_one_line(
    given: list[str], said: str, tmp_path: Path
) -> None:
    options = small_run(tmp_path)
    assert said in refusal(
        "train",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        options.data,
        "--output",
        tmp_path / "run",
        *given,
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(native.library() is None, reason="there are no compiled kernels")
@given(data=st.data())
def test_compiled_kernels_round_to_8_bits_as_torch_does(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 70))
    scale = data.draw(st.sampled_from([0.0, 1e-38, 2.0**-93, 1e-3, 1.0, 448.0, 1e30]))
    spoiled = data.draw(st.sampled_from([None, math.nan, math.inf, -math.inf]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    theta = torch.empty(rows * columns).normal_(generator=generator) * scale
    theta *= 2.0 ** -torch.randint(0, 24, theta.shape, generator=generator).float()
    if spoiled is not None:
        theta[-1] = spoiled
    bits: list[list[bytes]] = []
    for compiled in (True, False):
        transfer_dtype, scales, out = (
            torch.empty_like(theta, dtype=FP8),
            torch.empty(rows),
            torch.empty_like(theta),
        )
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr(dispatch, "takes", lambda *tensors: False)
                patch.setattr(dispatch, "decodes", lambda *tensors: False)
            encode(theta, transfer_dtype, scales)
            decode(transfer_dtype, scales, out)
        bits.append(
            [
                bytes(tensor.view(torch.uint8).tolist())
                for tensor in (transfer_dtype, scales, out[: -1 if spoiled else None])
            ]
        )
    assert bits[0] == bits[1]


@pytest.mark.skipif(native.library() is None, reason="there are no compiled kernels")
def test_every_number_between_two_of_8_bits_goes_to_the_nearer_one() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = codes[codes.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    infinity = torch.tensor(math.inf)
    theta = torch.cat(
        [numbers, middles, torch.nextafter(middles, infinity), torch.nextafter(middles, -infinity)]
    )
    transfer_dtype, scales = torch.empty_like(theta, dtype=FP8), torch.empty(1)
    encode(theta, transfer_dtype, scales)
    assert scales.item() == 1.0
    assert torch.equal(transfer_dtype.view(torch.uint8), theta.to(FP8).view(torch.uint8))


def test_one_launch_has_one_dtype_of_weights_and_one_of_copies(base: Path) -> None:
    model = open_checkpoint(base, precision="mixed", dtype="bfloat16")
    with closing(model.weights):
        buffer = WorkBuffer(model.layouts, HostDevice(), PhiloxNoise(), perturbs_in_place=False)
        copy = Program((7,), (), then=Perturb(0, 1.0, 1e-3))
        stores = {
            1: [
                torch.zeros(spec.stored_numel, dtype=spec.stored_dtype)
                for spec in model.layouts[1].parameters
            ]
        }
        operations = [
            Operation(view, (copy,), view.stored(stores), view.target, view.rounded)
            for view in buffer.segments[1].trained
        ]
        launches = divide_by_launch(operations)
        assert {out.dtype for launch in launches for out in launch.outs or ()} == {
            torch.float32,
            torch.bfloat16,
        }
        for launch in launches:
            assert len({weights.dtype for weights in launch.weights}) == 1
            assert len({out.dtype for out in launch.outs or ()}) == 1
