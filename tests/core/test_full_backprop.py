"""First-order steps of all parameters: losses, norms and weights equal those of loops over the
whole model, bit for bit.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import pytest
import torch
from engines import (
    Proxy,
    assert_equal,
    assert_same_outcome,
    behind_copies,
    first_order,
    inner,
    memory,
    open_engine,
    outcome,
    weights,
)
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, batches, make_batch, save_model, small_config
from peft_models import lora, monolithic, values_of
from profiles import each_choice, examples, short_first
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from whole_loops import BlockCoordinateLoop, WholeModel, adalomo_loop, lomo_loop, torch_loop

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.architecture import Precision
from zo2adapters.models.peft_adapter import is_of_adapter
from zo2core import (
    LOMO,
    AdaLOMO,
    BAdam,
    BlockUpdate,
    Delayed,
    Engine,
    FirstOrder,
    LossScaling,
    MemoryPolicy,
    TorchOptimizer,
)
from zo2core.errors import (
    BatchError,
    CheckpointError,
    ClosedError,
    MemoryBudgetError,
    NonFiniteLossError,
    OptionError,
)
from zo2core.methods.first_order import segment_gradient_bytes, trained_bytes
from zo2core.methods.gradient_steps import GradientSweeps
from zo2core.optimizers.adapter_and_base import AdapterAndBase
from zo2core.optimizers.loss_scaling import LossScale
from zo2core.optimizers.registry import make_block_update
from zo2core.optimizers.states import _StatesFromZero, copied_state, state_bytes
from zo2core.protocols import UpdateInputs
from zo2core.sweep.fused_step import FusedStep, GradientLimits
from zo2core.sweep.trained_weights import StoredWeights
from zo2core.types import BlockLayout, Lane, ParameterSpec, SegmentKind

ADAMW: Any = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1)
ADAPTED: Any = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
FUSED: Any = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1, fused=True)
SEED, EVERY = 3, 2  # of BAdam's turns
STEPS = 5


def delayed_loop(whole: WholeModel, make: Any, *clips: float | None) -> Callable[[float], None]:
    """ZeRO-Offload's delayed step: the gradients of a step are applied after those of the next are
    computed.
    """
    prompt, waiting = torch_loop(whole, make, *clips), list[tuple[float, dict[str, torch.Tensor]]]()

    def step(lr: float) -> None:
        waiting.append(
            (lr, {name: gradient.clone() for name, gradient in whole.gradients().items()})
        )
        if len(waiting) == 2:
            rate, gradients = waiting.pop(0)
            for name, parameter in whole.parameters.items():
                parameter.grad = gradients.get(name)
            prompt(rate)

    return step


class Case(NamedTuple):
    update: Callable[[], BlockUpdate]
    # of the whole model, the names of each turn, and the two limits of gradients
    loop: Callable[..., Any]
    lr: float = 1e-2


def eight_bits(parameters: Any, lr: float) -> Any:
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(parameters, lr=lr, min_8bit_size=128)


def of_torch(kind: Any, **options: Any) -> Case:
    make = partial(kind, lr=1.0, **options)
    return Case(
        lambda: TorchOptimizer(make), lambda whole, turns, *clips: torch_loop(whole, make, *clips)
    )


CASES = {
    "lomo": Case(
        lambda: LOMO(weight_decay=0.1),
        lambda whole, turns, *clips: lomo_loop(whole, 0.1, *clips),
        3e-2,
    ),
    "adalomo": Case(
        lambda: AdaLOMO(weight_decay=0.1),
        lambda whole, turns, *clips: adalomo_loop(whole, 0.1, *clips),
        3e-2,
    ),
    "badam": Case(
        lambda: BAdam(ADAMW, every=EVERY, seed=SEED),
        lambda whole, turns, *clips: BlockCoordinateLoop(whole, ADAMW, turns, EVERY, *clips),
    ),
    "adamw": of_torch(torch.optim.AdamW, weight_decay=0.1),
    "fused adamw": of_torch(torch.optim.AdamW, weight_decay=0.1, fused=True),
    "sgd": of_torch(torch.optim.SGD, momentum=0.9)._replace(lr=3e-2),
    "delayed": Case(
        lambda: Delayed(TorchOptimizer(FUSED)),
        lambda whole, turns, *clips: delayed_loop(whole, FUSED, *clips),
    ),
    "adagrad": of_torch(torch.optim.Adagrad, initial_accumulator_value=0.5),
    "adafactor": of_torch(torch.optim.Adafactor),
    "nadam": of_torch(torch.optim.NAdam),
    "amsgrad": of_torch(torch.optim.AdamW, amsgrad=True),
    "rmsprop": of_torch(torch.optim.RMSprop, momentum=0.5, centered=True),
    "asgd": of_torch(torch.optim.ASGD),
    "rprop": of_torch(torch.optim.Rprop),
    "8 bits": of_torch(eight_bits),
}
ON_DEVICES = list(CASES)[:6]


def cases(*short: str, among: Iterable[str] = CASES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", short_first(short, [name for name in among if name not in short])
    )


def rate(case: str) -> Callable[[int], float]:
    return lambda step: CASES[case].lr / (step + 1)


def turns_of(model: Any, update: BlockUpdate, steps: int = STEPS) -> Sequence[Sequence[str]]:
    """Names of the parameters that each of BAdam's turns trains."""
    trained = [index for index, layout in enumerate(model.layouts) if layout.parameters]
    turns = [update.segments(step, trained) for step in range(0, steps, EVERY)]
    return [
        [spec.name for index in turn for spec in model.layouts[index].parameters] for turn in turns
    ]


def assert_has(engine: Engine, whole: WholeModel) -> None:
    assert_equal(
        weights(engine), {name: value.detach() for name, value in whole.parameters.items()}
    )


def assert_equal_runs(
    engine: Engine, whole: WholeModel, loop: Any, case: str, micro_batches: Any, steps: int = STEPS
) -> None:
    """Take steps on both sides, and compare losses and weights after each."""
    for step in range(steps):
        if isinstance(loop, BlockCoordinateLoop):
            loop.begin()
        loss = whole.backward(micro_batches)
        loop(rate(case)(step))
        assert engine.step(micro_batches).loss == pytest.approx(loss, rel=1e-6)
        assert_has(engine, whole)


@cases("adalomo", "delayed", "nadam")
@examples(short=3, long=33)
@given(data=st.data())
def test_steps_are_those_of_a_whole_loop(
    case: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = data.draw
    config = draw(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    micro_batches = [draw(batches(config.vocab_size)) for _ in range(draw(st.integers(1, 3)))]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    base = save_model(tmp_path_factory.mktemp("full") / "base", config, dtype)
    model, update, whole = open_checkpoint(base), CASES[case].update(), WholeModel(base)
    clips = draw(st.sampled_from([(None, None), (0.01, None), (None, 0.05), (0.01, 0.05)]))
    loop = CASES[case].loop(whole, turns_of(model, update), *clips)
    policy = memory(None, draw(st.sampled_from([1, 30_000, 1 << 28])))
    options: Any = {
        "clip_value": clips[0],
        "clip": clips[1],
        "memory": policy,
        "overlap": draw(st.booleans()),
    }
    with first_order(model, update, lr=rate(case), **options) as engine:
        assert_equal_runs(engine, whole, loop, case, micro_batches)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("tied", "clip_norm", "case"), each_choice([False, True], [None, 0.05], ON_DEVICES)
)
def test_mixed_precision_is_that_of_autocast(
    case: str, clip_norm: float | None, tied: bool, tmp_path: Path
) -> None:
    base = save_model(
        tmp_path / "base", small_config("llama", tie_word_embeddings=tied), torch.bfloat16
    )
    model = open_checkpoint(base, precision="mixed", dtype="bfloat16", loss_chunk=None)
    update, whole = CASES[case].update(), WholeModel(base, torch.float32, torch.bfloat16)
    loop = CASES[case].loop(whole, turns_of(model, update), None, clip_norm)
    micro_batches = [make_batch(40, [7, 5]), make_batch(40, [6], seed=1)]
    with Engine(
        model, FirstOrder(update, lr=rate(case), clip=clip_norm), memory=memory()
    ) as engine:
        assert_equal_runs(engine, whole, loop, case, micro_batches)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(
        tmp_path / "base", small_config("llama", num_hidden_layers=4, tie_word_embeddings=True)
    )


BATCH = make_batch(40, [7, 5])
ROWS = [make_batch(40, [7, 5], seed=seed) for seed in range(STEPS)]


def engine_of(base: Path, case: str, optimizer: Any = ADAPTED, **options: Any) -> Engine:
    """Of all parameters, or of a LoRA adapter."""
    options = {"memory": memory(), **options}
    if case == "lora":
        model = open_checkpoint(base, adapter=Adapter(config=lora(init_lora_weights=False), seed=1))
        return first_order(model, optimizer, **options)
    return first_order(open_checkpoint(base), CASES[case].update(), lr=rate(case), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["lomo", "adamw"])
def test_norms_are_those_of_all_gradients_together_and_those_within_the_limit_change_nothing(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), dtype)
    whole, made = WholeModel(base), []
    whole.backward([BATCH])
    gradients = [
        gradient.float() if case == "lomo" else gradient for gradient in whole.gradients().values()
    ]
    for clip_norm in (None, 1e3):
        with engine_of(base, case, clip=clip_norm) as engine:
            assert (
                engine.step(BATCH).grad_norm
                == torch.nn.utils.get_total_norm(gradients).item()
                < 1e3
            )
            made.append(weights(engine))
    assert_equal(*made)


@cases("lora", "lomo", "badam", among=["lora", *ON_DEVICES])
def test_a_device_of_its_own_memory_computes_the_same(case: str, base: Path) -> None:
    expected = outcome(engine_of(base, case), [BATCH] * STEPS)
    # trained blocks would need a directory to stream
    other = (1, True, 3) if case == "lora" else (0, False, None)
    for kept, overlap, buckets in ((0, True, None), (2, True, None), other):
        policy = memory(buckets, kept=kept if overlap else None, budget=1 << 40)
        with (
            behind_copies(1e-4) as device,
            engine_of(base, case, device=device, memory=policy, overlap=overlap) as engine,
        ):
            results = [engine.step(BATCH) for _ in range(STEPS)]
            assert_same_outcome(([result.losses for result in results], weights(engine)), expected)
        block = engine._run.model.layouts[1].nbytes
        offloaded = [result.lanes[Lane.OFFLOAD].nbytes for result in results]
        if case == "lora":
            assert (
                offloaded == [result.lanes[Lane.WRITE].nbytes for result in results] == [0] * STEPS
            ), "it is only read"
        elif kept == 0 and overlap:
            assert max(offloaded) == (block if case == "badam" else 4 * block), (
                "each changed block comes back once a step"
            )


def test_a_tied_weight_is_updated_once(base: Path) -> None:
    counted: list[str] = []
    held: list[int] = []

    class Counting(LOMO):
        def apply(self, inputs: UpdateInputs) -> None:
            counted.extend(inputs.gradients)
            held.append(len(inner(engine)._state.weights._gradients))
            super().apply(inputs)

    with Engine(open_checkpoint(base), FirstOrder(Counting(), lr=1e-2), memory=memory()) as engine:
        engine.step([BATCH, make_batch(40, [4])])
        names = [name for name, _ in engine.parameters_now()]
    assert sorted(counted) == sorted(names)
    assert held == [0] * 6, "the gradients of one segment are in memory at a time"
    assert counted[-1] == "model.embed_tokens.weight", (
        "its gradient is whole once the embedding's backward pass has ended"
    )


def test_badam_trains_each_segment_once_an_epoch_and_computes_no_gradient_below_it(
    base: Path,
) -> None:
    update = BAdam(ADAMW, every=1, seed=5)
    epochs = [
        [one for turn in range(5) for one in update.segments(5 * epoch + turn, range(5))]
        for epoch in range(3)
    ]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [update.segments(step, range(5)) for step in range(15)] == [
        BAdam(ADAMW, every=1, seed=5).segments(step, range(5)) for step in range(15)
    ]
    with Engine(open_checkpoint(base), FirstOrder(update, lr=1e-2), memory=memory()) as engine:
        for step in range(6):
            before = weights(engine)
            engine.step(BATCH)
            changed = {
                name
                for name, value in weights(engine).items()
                if not torch.equal(value, before[name])
            }
            [segment] = update.segments(step, inner(engine)._state.weights.segments)
            assert changed == set(inner(engine)._state.weights.names_of(segment))
            leaves = inner(engine)._steps._sweeps._visits.leaves
            assert next(index for index, names in enumerate(leaves) if names) == segment


def test_badam_begins_each_turn_with_a_new_optimizer_over_two_epochs(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama", num_hidden_layers=1), torch.bfloat16)
    model, whole, steps = open_checkpoint(base, precision="exact"), WholeModel(base), 13
    loop = BlockCoordinateLoop(
        whole, ADAMW, turns_of(model, CASES["badam"].update(), steps), EVERY, None, None
    )
    with Engine(
        model, FirstOrder(CASES["badam"].update(), lr=rate("badam")), memory=memory()
    ) as engine:
        assert_equal_runs(engine, whole, loop, "badam", [BATCH], steps)


@pytest.mark.parametrize("case", ["adamw", "lora"])
def test_a_step_that_is_refused_before_an_update_changes_nothing(case: str, base: Path) -> None:
    with engine_of(base, case) as engine:
        engine.step(BATCH)
        before = weights(engine)
        with pytest.raises(BatchError):
            engine.step({key: value for key, value in BATCH.items() if key != "labels"})
        infinite: Any = Proxy(
            engine._run.model, head=lambda head, *given: head(*given) * float("inf")
        )
        with pytest.raises(NonFiniteLossError, match=r"step 1: found loss inf.*no step was taken"):
            engine.step(BATCH, forward=infinite)
        assert_equal(weights(engine), before)
        assert engine.version == 1
        if case == "lora":
            assert all(
                parameter.grad is None
                for parameter in inner(engine)._state.weights.parameters.values()
            )
        expected = engine.step(BATCH).losses
    assert outcome(engine_of(base, case), [BATCH] * 2)[0][1] == expected


def poisoned(engine: Engine, factor: float) -> Any:
    """A model's forward, the gradient of whose third block's output is multiplied by a factor."""

    def block(real: Any, index: int, activations: Any) -> Any:
        given = real(index, activations)
        if index == 2 and given.hidden.requires_grad:
            given.hidden.register_hook(lambda gradient: gradient * factor)
        return given

    return Proxy(engine._run.model, block=block)


@pytest.mark.parametrize(
    ("options", "factor", "told"),
    [
        ({}, "nan", "2 segments had been changed"),
        ({"clip": 1.0}, "nan", "no step was taken"),
        # and the scale cannot be lowered
        ({"scaling": LossScaling(initial=1.0)}, "inf", "no step was taken"),
    ],
    ids=["between updates", "measured", "scaled"],
)
def test_a_gradient_that_is_not_finite_is_found(
    options: dict[str, Any], factor: str, told: str, base: Path
) -> None:
    """Found in the sweep that measures, it changes nothing; found between updates, it closes the
    engine.
    """
    with engine_of(base, "lomo", **options) as engine:
        with pytest.raises(NonFiniteLossError, match=told):
            engine.step(BATCH, forward=poisoned(engine, float(factor)))
        if told == "no step was taken":
            engine.step(BATCH)
        else:
            for use in (lambda: engine.step(BATCH), lambda: next(engine.parameters_now())):
                with pytest.raises(ClosedError):
                    use()


@cases("adamw", "badam", "delayed", "rmsprop", "lora", among=["lora", *CASES])
def test_a_state_goes_on_with_the_same_bits_and_its_engine_does_not_change_it(
    case: str, base: Path, tmp_path: Path
) -> None:
    with engine_of(base, case) as engine, engine_of(base, case) as loaded:
        for batch in ROWS[:3]:
            engine.step(batch)
        torch.save(engine.state_dict(), tmp_path / "state.pt")
        loaded.load_state_dict(engine.state_dict())
        expected = [engine.step(batch).losses for batch in ROWS[3:]], weights(engine)
        evaluated = engine.evaluate(ROWS).losses
        assert_same_outcome(
            ([loaded.step(batch).losses for batch in ROWS[3:]], weights(loaded)), expected
        )
    with engine_of(base, case) as other:
        other.step(ROWS[2])  # another run, which is left
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert other.version == 3
        assert_same_outcome(
            ([other.step(batch).losses for batch in ROWS[3:]], weights(other)), expected
        )
        assert other.evaluate(ROWS).losses == evaluated


def test_weights_dropped_by_an_interrupted_load_are_not_the_bases(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StoredWeights.set_values

    def interrupted(self: StoredWeights, index: int, *given: Any) -> None:
        if index == 2:
            raise KeyboardInterrupt
        real(self, index, *given)

    with engine_of(base, "lomo") as engine:
        engine.step(BATCH)
        state = {**engine.state_dict(), "parameters": weights(engine)}
        monkeypatch.setattr(StoredWeights, "set_values", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.load_state_dict(state)
        with pytest.raises(
            ClosedError, match=r"found weights of version 0: .*; expected version 1"
        ):
            engine.step(BATCH)


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = [1]


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a block's frozen parameters": (
        lambda base: Engine(
            open_checkpoint(
                base, adapter=Adapter(config=pytest.importorskip("peft").LoraConfig(r=2), seed=1)
            ),
            FirstOrder(LOMO(), lr=1e-3),
        ),
        "which is frozen; expected a model all of whose parameters are trained",
    ),
    "weights in 8 bits": (
        lambda base: Engine(
            open_checkpoint(base, precision="mixed", dtype="bfloat16", transfer_dtype="float8"),
            FirstOrder(LOMO(), lr=1.0),
        ),
        r"transfer_dtype: found torch.float8_e4m3fn for ",
    ),
    "scaled gradients in float16": (
        lambda base: Engine(
            open_checkpoint(base, precision="exact", dtype="float16"),
            FirstOrder(TorchOptimizer(ADAMW), lr=1.0, scaling=LossScaling()),
        ),
        "scaling: found float16 gradients of ",
    ),
    "too little memory": (
        lambda base: engine_of(base, "lomo", memory=MemoryPolicy(host="1MB")),
        r"the smallest plan.*4 of 4 blocks",
    ),
    "a snapshot without a run": (lambda base: engine_of(base, "lomo").take_snapshot(), "run="),
    "growth by backing off": (
        lambda base: LossScaling(backoff=1.5),
        r"loss_scaling.backoff: found 1\.5",
    ),
    "weight decay": (lambda base: LOMO(weight_decay=-1), "weight_decay: found -1"),
    "turns of no step": (lambda base: BAdam(ADAMW, every=0), "every: found 0"),
    "turns that are delayed": (
        lambda base: Delayed(BAdam(ADAMW)),
        "update: found badam, which trains segments in turns",
    ),
    "a closure": (
        lambda base: TorchOptimizer(torch.optim.LBFGS),
        "LBFGS, whose step evaluates the loss again by a closure",
    ),
    "a state of all parameters": (
        lambda base: TorchOptimizer(partial(Counting, lr=1.0)),
        "Counting, which keeps a state of all parameters together",
    ),
    "an odd state": (
        lambda base: TorchOptimizer(partial(Odd, lr=1.0)),
        "Odd, which keeps a list as history",
    ),
}


@pytest.mark.parametrize(("make", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused(
    make: Callable[[Path], object], told: str, base: Path
) -> None:
    kind = MemoryBudgetError if "smallest plan" in told else OptionError
    with pytest.raises(kind, match=told):
        make(base)


def test_late_weights_wait_for_a_slow_update(base: Path) -> None:
    class Slow(LOMO):
        def apply(self, inputs: UpdateInputs) -> None:
            time.sleep(0.02)  # longer than a segment's passes
            super().apply(inputs)

    losses: list[list[float]] = []
    kept: list[Any] = []
    for update in (LOMO(weight_decay=0.1), Slow(weight_decay=0.1)):
        with Engine(
            open_checkpoint(base), FirstOrder(Delayed(update), lr=rate("lomo")), memory=memory()
        ) as engine:
            losses.append([engine.step(batch).loss for batch in ROWS])
            kept.append(engine.state_dict()["optimizer"])
    assert losses[0] == losses[1]
    for segment, states in kept[0].items():
        assert_equal(states, kept[1][segment])


def test_a_late_update_has_the_gradients_of_its_own_step() -> None:
    """The memory of gradients is used again before the update is made."""
    used_again = threading.Event()

    class Waiting(LOMO):
        def apply(self, inputs: UpdateInputs) -> None:
            assert used_again.wait(60)
            super().apply(inputs)

    update, weight, gradient = Delayed(Waiting()), torch.ones(3), torch.full((3,), 2.0)
    states = {
        "delayed.begun": torch.zeros((), dtype=torch.uint8),
        "w.next": torch.zeros(3),
        "w.gradient": torch.zeros(3),
    }
    inputs = UpdateInputs(0, {"w": weight}, {"w": gradient}, states, step=0, lr=0.25)
    update.apply(inputs)
    gradient.zero_()
    used_again.set()
    update.apply(inputs._replace(step=1))
    update.settle()
    assert update.options["delayed"] is True
    assert weight.tolist() == [0.5] * 3


def scaled_loop(
    whole: WholeModel, make: Any, scaler: torch.amp.GradScaler, clip: float | None
) -> Callable[..., float]:
    """A step with torch's own scaler of the loss."""
    trained = list(whole.parameters.values())
    optimizer = make(trained)

    def step(batch: Any, lr: float) -> float:
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast("cpu", dtype=torch.float16):
            loss = whole.model(**batch, use_cache=False).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(trained, clip, norm)
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())

    return step


class PlainLOMO(torch.optim.Optimizer):
    """LOMO as an optimizer of torch's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1.0 - group["lr"] * 0.1)
                parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.few(2)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(
    ("case", "make"), [("lomo", PlainLOMO), ("adamw", ADAMW), ("fused adamw", FUSED)]
)
def test_the_loss_is_scaled_as_by_torchs_scaler(
    case: str, make: Any, clip: float | None, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), torch.float16)
    precision = Precision(stored=torch.float32, computed=torch.float16)
    whole = WholeModel(base, torch.float32)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**28, backoff_factor=1 / 8, growth_interval=2
    )
    loop = scaled_loop(whole, make, scaler, clip)
    scaling = LossScaling(initial=2.0**28, backoff=1 / 8, interval=2)
    model, skipped = open_checkpoint(base, precision=precision, loss_chunk=None), 0
    with Engine(
        model,
        FirstOrder(CASES[case].update(), lr=rate(case), clip=clip, scaling=scaling),
        memory=memory(),
    ) as engine:
        for step in range(12):
            batch = make_batch(40, [7, 5], seed=step)
            assert inner(engine)._state.scale.values()["loss_scale"] == scaler.get_scale()
            loss = loop(batch, rate(case)(step))
            result = engine.step(batch)
            assert result.loss == loss
            skipped += result.grad_norm == 0.0
            assert_has(engine, whole)
    assert 2 <= skipped <= 9, "some steps overflow, and others do not"


def test_the_loss_of_several_outputs_is_scaled_as_well(base: Path) -> None:
    """The scale enters at the joint loss of all outputs, in which the larger one counts twice."""

    def loss(_: Any, outputs: Sequence[torch.Tensor], micro_batches: Any) -> torch.Tensor:
        stacked = torch.stack(list(outputs))
        return stacked.sum() + stacked.max()

    results = []
    for scaling in (None, LossScaling(initial=8.0)):
        with engine_of(base, "lomo", scaling=scaling) as engine:
            joint: Any = Proxy(engine._run.model, split=lambda _, batch, rows: [batch], loss=loss)
            engine.step([BATCH, make_batch(40, [6], seed=1)], forward=joint)
            results.append(weights(engine))
    assert_equal(*results)  # powers of two change no bit


@given(overflows=st.lists(st.booleans(), max_size=60), interval=st.integers(1, 4))
def test_the_scale_changes_as_torch_changes_it(overflows: list[bool], interval: int) -> None:
    # never at the least scale of 1
    scaling = LossScaling(initial=2.0**90, growth=4.0, backoff=0.25, interval=interval)
    ours, scale, tracker = (
        LossScale(scaling),
        torch.tensor(2.0**90),
        torch.zeros((), dtype=torch.int32),
    )
    for overflowed in overflows:
        ours.update(overflowed=overflowed)
        found = torch.tensor(float(overflowed))
        torch._amp_update_scale_(scale, tracker, found, 4.0, 0.25, interval)
        assert ours.scale == scale.item()
        assert ours.values()["good_steps"] == tracker.item()


def test_a_state_has_the_scale_of_the_loss(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), torch.float16)
    told: Any = {"memory": memory(), "scaling": LossScaling(initial=2.0**40)}
    precision = Precision(stored=torch.float32, computed=torch.float16)

    def scaled() -> Engine:
        return first_order(
            open_checkpoint(base, precision=precision), LOMO(), lr=rate("lomo"), **told
        )

    with scaled() as engine, scaled() as other:
        for _ in range(2):
            assert engine.step(BATCH).grad_norm == 0.0, "its gradients overflow"
        other.load_state_dict(engine.state_dict())
        assert other.state_dict()["values"] == {"loss_scale": 2.0**38, "good_steps": 0}


Forge = Callable[[dict[str, Any]], object]
FORGED: Mapping[str, Forge] = {
    "no optimizer": lambda state: state.pop("optimizer"),
    "steps that are a text": lambda state: state.update(steps="3"),
    "parameters that are a number": lambda state: state.update(parameters=3),
    "a parameter that is a number": lambda state: state["parameters"].update(
        {next(iter(state["parameters"])): 1.0}
    ),
    "NaN in a parameter": lambda state: (
        next(iter(state["parameters"].values())).view(-1)[:1].fill_(float("nan"))
    ),
    "infinity in a state": lambda state: state["optimizer"][1].update(
        {
            name: value + float("inf")
            for name, value in state["optimizer"][1].items()
            if value.is_floating_point()
        }
    ),
    "a segment that is not there": lambda state: state["optimizer"].update({99: {}}),
    "a state that is a number": lambda state: state["optimizer"][1].update(
        dict.fromkeys(state["optimizer"][1], 1)
    ),
    "a scale that is a text": lambda state: state.update(values={"loss_scale": "2"}),
    "no method": lambda state: state.pop("method"),
}
FORGED_OPTIONS = (
    ("eps", float("nan")),
    ("betas", [0.9, float("inf")]),
    ("weight_decay", "0"),
    ("maximize", 1),
)
FORGED_OF_LORA: Sequence[tuple[Forge, str]] = [
    (lambda state: state["parameters"].popitem(), "15 parameters that are not all of the 16"),
    (
        lambda state: state["optimizer"]["state"][3]["exp_avg"].view(-1)[:1].fill_(float("nan")),
        "exp_avg of parameter 3 with values that are not finite",
    ),
    (
        lambda state: state["optimizer"]["state"][3].update(exp_avg=torch.zeros(1)),
        "exp_avg, a state of parameter 3",
    ),
    *(
        (
            lambda state, changed=changed: state["optimizer"]["param_groups"][0].update([changed]),
            "an optimizer with other options",
        )
        for changed in FORGED_OPTIONS
    ),
]


@pytest.mark.parametrize("case", ["adamw", "lora"])
def test_a_forged_state_is_refused_and_changes_nothing(case: str, base: Path) -> None:
    """Those of another run are, and that of another optimizer, so that nothing of them may be taken
    over.
    """
    with engine_of(base, case) as other:
        other.step(ROWS[2])
        theirs = other.state_dict()
        others: list[Any] = [{"case": "sgd"}]
        if case == "lora":
            momentum = partial(torch.optim.SGD, momentum=0.9)
            makes = (torch.optim.SGD, momentum, torch.optim.Adam, torch.optim.Adagrad)
            others = [{"case": case, "optimizer": make} for make in makes]
        for options in others:
            told = (
                "an optimizer with other options" if case == "lora" else "a state of the optimizer"
            )
            with engine_of(base, **options) as another, pytest.raises(CheckpointError, match=told):
                another.load_state_dict(theirs)
        with engine_of(base, case) as engine:
            losses = [engine.step(ROWS[0]).losses]
            for forge, told in (
                FORGED_OF_LORA if case == "lora" else [(forge, "") for forge in FORGED.values()]
            ):
                state = copied_state(theirs)
                forge(state)
                with pytest.raises(CheckpointError, match=rf"^state: .*{told}"):
                    engine.load_state_dict(state)
            losses.append(engine.step(ROWS[1]).losses)
            assert_same_outcome((losses, weights(engine)), outcome(engine_of(base, case), ROWS[:2]))


@pytest.mark.parametrize("case", ["fused adamw", "badam"])
def test_first_states_are_taken_over_and_not_copied(
    case: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies would take the memory of the largest segment's states twice."""
    made: list[str] = []
    real = _StatesFromZero.__missing__

    def missing(self: _StatesFromZero, name: str) -> torch.Tensor:
        made.append(name)
        return real(self, name)

    monkeypatch.setattr(_StatesFromZero, "__missing__", missing)
    with engine_of(base, case) as engine:
        for _ in range(2 * EVERY):
            engine.step(BATCH)
    assert made
    assert all(name.endswith(".has_state") for name in made)


def test_adalomo_has_the_options_that_it_was_given() -> None:
    """A second step by hand: the moment is (6 + (1 + 1)) / 2, the update 1 / 2, which is halved,
    and its rate 1 / 4.
    """
    update = AdaLOMO(eps=(1.0, 0.25), clip_threshold=0.25, decay_rate=-1.0)
    weight, states = torch.zeros(2), {"w.squares": torch.full((2,), 6.0)}
    update.apply(UpdateInputs(0, {"w": weight}, {"w": torch.ones(2)}, states, step=1, lr=1.0))
    assert states["w.squares"].tolist() == [4.0, 4.0]
    assert weight.tolist() == [-0.0625, -0.0625]


@pytest.mark.parametrize(
    ("name", "options", "make"),
    [
        ("adamw", {"betas": (0.8, 0.95), "eps": 1e-3}, torch.optim.AdamW),
        ("badam", {"betas": (0.8, 0.95), "eps": 1e-3}, torch.optim.AdamW),
        ("sgd", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    ],
)
def test_an_optimizer_that_is_named_has_the_options_that_it_was_given(
    name: Any, options: Any, make: Any
) -> None:
    update = make_block_update(name, weight_decay=0.1, options=options)
    specs = (ParameterSpec("w", (4, 3), torch.float32, 0, decays=True),)
    states = _StatesFromZero(update.states(BlockLayout("block", SegmentKind.BLOCK, specs)))
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    whole = torch.nn.Parameter(weight.clone())
    optimizer = make([whole], lr=0.25, weight_decay=0.1, fused=True, **options)
    for step in range(3):
        whole.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        update.apply(UpdateInputs(0, {"w": weight}, {"w": whole.grad}, states, step=step, lr=0.25))
        assert torch.equal(weight, whole.detach())


@pytest.mark.parametrize(
    ("shape", "states"),
    [
        ((5,), {"w": (5,)}),
        ((3, 4), {"rows": (3,), "columns": (4,)}),
        ((2, 3, 4), {"rows": (2, 3), "columns": (2, 4)}),  # experts: each has its own
    ],
)
def test_adalomo_keeps_a_row_and_a_column_of_each_matrix(
    shape: tuple[int, ...], states: dict[str, tuple[int, ...]]
) -> None:
    spec = ParameterSpec("w", shape, torch.float32, 0, decays=True)
    kept = AdaLOMO().states(BlockLayout("block", SegmentKind.BLOCK, (spec,)))
    assert sorted(state.shape for state in kept) == sorted(states.values())


class _LargestTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensors of at least a size that operations make and that are alive."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._nbytes = nbytes
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {tensor.data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        if (
            isinstance(made, torch.Tensor)
            and made.nbytes >= self._nbytes
            and made.data_ptr() not in given
        ):
            storage = made.untyped_storage()
            self._alive.add(storage.data_ptr())
            weakref.finalize(storage, self._alive.discard, storage.data_ptr())
            self.most = max(self.most, len(self._alive))
        return made


def test_converted_gradients_are_clipped_and_unscaled_in_place() -> None:
    given = {
        name: torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
        for name in ("a", "b")
    }
    gradients, scale = dict(given), LossScale(LossScaling())
    limits, unused = GradientLimits(norm=1.0, value=0.5), cast("Any", None)
    step = FusedStep(BAdam(ADAMW), unused, scale, limits, unused, [*gradients], 0)
    step.total = torch.tensor(8.0)
    with _LargestTensors(4 * 64 * 128) as made:
        step.prepare(gradients)
    assert made.most == 2
    for name, gradient in given.items():
        unscaled = gradient.float() * torch.tensor(1.0 / scale.scale, dtype=torch.float32)
        expected = unscaled.clamp(-0.5, 0.5) * torch.clamp(
            1.0 / (torch.tensor(8.0) + 1e-6), max=1.0
        )
        assert torch.equal(gradients[name], expected)
        assert gradient.dtype is torch.bfloat16


def test_a_turn_takes_the_memory_of_its_one_segment() -> None:
    def layout(name: str, *sizes: int) -> BlockLayout:
        specs = tuple(
            ParameterSpec(f"{name}.{n}", (64, size), torch.bfloat16, n, decays=True)
            for n, size in enumerate(sizes)
        )
        return BlockLayout(name, SegmentKind.BLOCK, specs)

    # one with more gradients at a time, one with more states
    wide, deep = layout("wide", 100), layout("deep", 40, 40, 40)
    update = BAdam(ADAMW)
    for one, numel, largest in ((wide, 6400, 6400), (deep, 7680, 2560)):
        # In float32, and beside them one parameter's in bfloat16 while it is converted.
        assert segment_gradient_bytes(update, [one]) == 4 * numel + 2 * largest
    apart = [sum(trained_bytes(update, [one])) for one in (wide, deep)]
    assert sum(trained_bytes(update, [wide, deep])) == max(apart)
    assert max(apart) < segment_gradient_bytes(update, [wide, deep]) + state_bytes(
        update, [wide, deep]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "update", [LOMO(weight_decay=0.1), AdaLOMO(weight_decay=0.1)], ids=["lomo", "adalomo"]
)
def test_an_optimizer_makes_no_more_copies_than_it_says(update: Any, dtype: torch.dtype) -> None:
    spec = ParameterSpec("weight", (64, 128), dtype, 0, decays=True)
    layout = BlockLayout("block", SegmentKind.BLOCK, (spec,))
    states = {
        state.name: torch.zeros(state.shape, dtype=state.stored_dtype)
        for state in update.states(layout)
    }
    weights, gradients = (
        {"weight": torch.randn(64, 128).to(dtype)},
        {"weight": torch.randn(64, 128)},
    )
    with _LargestTensors(4 * spec.numel) as made:
        update.apply(UpdateInputs(0, weights, gradients, states, step=0, lr=0.1))
    widened = dtype is torch.bfloat16
    assert made.most == (update.copies if widened else update.copies - 1)
    given = spec.nbytes
    assert segment_gradient_bytes(update, [layout]) == 4 * spec.numel + max(
        given, update.copies * 4 * spec.numel
    )


@pytest.mark.parametrize("delays", [True, False])
def test_parameters_are_loaded_before_the_first_step_only(tmp_path: Path, delays: bool) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config("opt")))
    with Engine(model, FirstOrder(Delayed(LOMO()) if delays else LOMO(), lr=1e-2)) as engine:
        values = {name: torch.zeros_like(value) for name, value in engine.parameters_now()}
        engine.load_parameters(values)
        assert all(not value.any() for _, value in engine.parameters_now())
        engine.step(make_batch(40, [7]))
        with pytest.raises(OptionError, match="without steps"):
            engine.load_parameters(values)


LORA_LR, BASE_LR = 1e-2, 5e-2


class LoRAAndLOMO:
    """A whole model whose adapter torch's AdamW trains, and the base under it LOMO, in one step."""

    def __init__(
        self, base: Path, clip_norm: float | None = None, autocast: torch.dtype | None = None
    ) -> None:
        config = lora(init_lora_weights=False)
        opened = self.opened(base, "exact" if autocast is None else "mixed")
        values = {name: value for name, value in values_of(opened).items() if is_of_adapter(name)}
        model = monolithic(base, config, values)
        if autocast is not None:
            model = cast("Any", model).float()
        self.whole = WholeModel(model, autocast=autocast)
        for parameter in self.whole.parameters.values():
            parameter.requires_grad = True
        self._clip_norm = clip_norm
        self._adamw = torch.optim.AdamW(
            [value for name, value in self.whole.parameters.items() if is_of_adapter(name)],
            weight_decay=0.1,
        )

    @staticmethod
    def opened(base: Path, precision: str = "exact") -> Any:
        """The model whose segments are streamed."""
        adapter = Adapter(config=lora(init_lora_weights=False), seed=1, trains_base=True)
        dtype = "auto" if precision == "exact" else "bfloat16"
        return open_checkpoint(
            base, adapter=adapter, precision=precision, dtype=dtype, loss_chunk=None
        )

    @staticmethod
    def update() -> AdapterAndBase:
        return AdapterAndBase(
            TorchOptimizer(partial(torch.optim.AdamW, weight_decay=0.1)),
            LOMO(weight_decay=0.1),
            base_lr=lambda step: BASE_LR / (step + 1),
            is_of_adapter=is_of_adapter,
        )

    def step(self, number: int, micro_batches: Sequence[Any]) -> tuple[float, float]:
        """Take a step; returns the loss and the norm of all gradients before it was clipped."""
        loss = self.whole.backward(micro_batches)
        gradients = {name: gradient.float() for name, gradient in self.whole.gradients().items()}
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        parameters = self.whole.parameters
        for name, gradient in gradients.items():
            if self._clip_norm is not None:
                gradient *= torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)
            if is_of_adapter(name):
                parameters[name].grad = gradient
            else:
                _descend(parameters[name], gradient, BASE_LR / (number + 1))
        for group in self._adamw.param_groups:
            group["lr"] = LORA_LR / (number + 1)
        self._adamw.step()
        return loss, norm.item()


@torch.no_grad()
def _descend(parameter: torch.Tensor, gradient: torch.Tensor, lr: float) -> None:
    """LOMO's update, in float32 (OpenLMLab/LOMO's program)."""
    theta = parameter.float()
    parameter.copy_(theta.mul_(1.0 - lr * 0.1).add_(gradient, alpha=-lr))


@pytest.mark.parametrize(
    ("model_type", "dtype", "clip_norm", "buckets"),
    [
        ("llama", torch.float32, None, None),
        ("llama", torch.bfloat16, 0.5, 2),
        ("opt", torch.float32, 0.5, 2),
        ("opt", torch.bfloat16, None, None),
    ],
)
def test_lora_by_adamw_and_its_base_by_lomo_have_the_bits_of_peft_and_torch(
    model_type: str,
    dtype: torch.dtype,
    clip_norm: float | None,
    buckets: int | None,
    tmp_path: Path,
) -> None:
    targets = {"opt": ["q_proj", "fc1"], "llama": ["q_proj", "up_proj"]}[model_type]
    base = save_model(tmp_path / "base", small_config(model_type, num_hidden_layers=4), dtype)
    with patch(f"{__name__}.lora", partial(lora, target_modules=targets)):
        both = LoRAAndLOMO(base, clip_norm)
        streamed: dict[str, Any] = {"run": tmp_path / "run", "commit_every": 2}
        options = streamed if buckets is not None else {}
        micro_batches = [make_batch(40, [7, 5]), make_batch(40, [6], seed=1)]

        def opened() -> Engine:
            method = FirstOrder(both.update(), lr=lambda step: LORA_LR / (step + 1), clip=clip_norm)
            return open_engine(both.opened(base), method, memory=memory(buckets), **options)

        engine = opened()
        for number in range(3):
            if number == 2 and buckets is not None:
                engine.close()
                engine = opened()  # from the commit on disk
            loss, norm = both.step(number, micro_batches)
            result = engine.step(micro_batches)
            assert result.loss == pytest.approx(loss, rel=1e-6)
            assert result.grad_norm == norm
            assert_has(engine, both.whole)
        engine.close()


def test_lora_and_lomo_in_mixed_precision_are_those_of_autocast(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), torch.bfloat16)
    both = LoRAAndLOMO(base, autocast=torch.bfloat16)
    method = FirstOrder(both.update(), lr=lambda step: LORA_LR / (step + 1))
    with Engine(both.opened(base, "mixed"), method, memory=memory()) as engine:
        for number in range(3):
            loss, _ = both.step(number, [BATCH])
            assert engine.step(BATCH).loss == loss
            assert_has(engine, both.whole)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
def test_an_adapter_and_its_base_resume_from_a_snapshot_and_are_exported_together(
    tmp_path: Path,
) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    peft: Any = pytest.importorskip("peft")

    def opened(run: Path | None) -> Engine:
        method = FirstOrder(LoRAAndLOMO.update(), lr=LORA_LR)
        return Engine(LoRAAndLOMO.opened(base), method, memory=memory(), run=run)

    with opened(None) as engine:
        expected = [engine.step(batch).loss for batch in ROWS]
        final = weights(engine)
    with opened(tmp_path / "run") as engine:
        losses = [engine.step(batch).loss for batch in ROWS[:2]]
        engine.take_snapshot()
    with opened(tmp_path / "run") as engine:
        losses += [engine.step(batch).loss for batch in ROWS[2:]]
        assert losses == expected
        assert_equal(weights(engine), final)
        engine.export(tmp_path / "both")
        evaluated = engine.evaluate([BATCH]).loss
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "both" / "base")
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "both" / "adapter").eval()
    assert loaded(**BATCH).loss.item() == evaluated
    assert loaded.peft_config["default"].base_model_name_or_path == str(tmp_path / "both" / "base")
    of_base = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    changed = {name for name, value in final.items() if not is_of_adapter(name)}
    changed -= {
        name for name, value in of_base.items() if torch.equal(value, final.get(name, value))
    }
    assert any("base_layer" in name for name in changed), "the base has changed under the adapter"


def test_an_adapter_and_its_base_refuse_turns_and_an_adapter_in_16_bits(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="in turns"):
        AdapterAndBase(LOMO(), BAdam(ADAMW), base_lr=1.0, is_of_adapter=is_of_adapter)
    base = save_model(tmp_path / "base", small_config("llama"), torch.bfloat16)
    config = lora(modules_to_save=["norm"])
    model = open_checkpoint(base, adapter=Adapter(config=config, trains_base=True))
    with pytest.raises(OptionError, match="modules_to_save"):
        Engine(model, FirstOrder(LoRAAndLOMO.update(), lr=1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, LossScaling(initial=8.0)])
def test_norms_of_layers_are_clipped_one_by_one_in_one_backward_pass(
    dtype: torch.dtype, scaling: LossScaling | None, tmp_path: Path
) -> None:
    limit, lr = 0.05, 3e-2
    base = save_model(tmp_path / "base", small_config("llama", tie_word_embeddings=True), dtype)
    model, whole = open_checkpoint(base), WholeModel(base)
    segments = [[spec.name for spec in layout.parameters] for layout in model.layouts]
    swept: list[bool] = []

    def sweep(self: Any, *rows: Any, real: Any = GradientSweeps.sweep, **options: Any) -> Any:
        swept.append(True)
        return real(self, *rows, **options)

    method = FirstOrder(LOMO(), lr=lr, clip=limit, clip_per="layer", scaling=scaling)
    with (
        patch.object(GradientSweeps, "sweep", sweep),
        Engine(model, method, memory=memory()) as engine,
    ):
        for batch in ROWS[:2]:
            loss = whole.backward([batch])
            gradients = {name: value.float() for name, value in whole.gradients().items()}
            norms = []
            for names in filter(None, segments):
                of_segment = [gradients[name] for name in names]
                norm = torch.nn.utils.get_total_norm(of_segment)
                norms.append(norm.item())
                factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
                with torch.no_grad():
                    for name, gradient in zip(names, of_segment, strict=True):
                        theta = whole.parameters[name].float()
                        whole.parameters[name].copy_(theta.add_(gradient * factor, alpha=-lr))
            assert max(norms) > limit, "something is clipped"
            result = engine.step(batch)
            assert result.loss == pytest.approx(loss, rel=1e-6)
            assert result.grad_norm == torch.nn.utils.get_total_norm(list(gradients.values()))
            if scaling is None or dtype is torch.float32:  # powers of 2 change no bit of these
                assert_has(engine, whole)
    assert len(swept) == (2 if scaling is None else 4), "the norm of all takes one sweep more"
    assert method.journal_options["clip_norm_per"] == "layer"


def test_norms_of_layers_need_a_limit_and_an_optimizer_of_all_parameters() -> None:
    for options, optimizer, said in (
        ({"clip_per": "layer"}, LOMO(), "clip, the largest norm"),
        ({"clip_per": "layer", "clip": 1.0}, ADAPTED, "a BlockUpdate"),
        ({"clip_per": "block", "clip": 1.0}, LOMO(), "all or layer"),
    ):
        with pytest.raises(OptionError, match=said):
            FirstOrder(optimizer, lr=1e-2, **cast("Any", options))
