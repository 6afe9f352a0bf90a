"""Programs that train: dual forwards are plain LoRA-FA, the runtime's trajectory is the module's,
its state an engine's.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_batch, save_model, small_config
from peft_models import TARGETS, lora, monolithic, values_of
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from zo2adapters import (
    Adapter,
    HFBlockModel,
    MonolithicMeZO,
    ProgramState,
    TrainingProgram,
    open_checkpoint,
    write_program,
)
from zo2adapters.edge.program import (
    GROUP,
    DualForwardLinear,
    Signs,
    TrainingStep,
    append_digest,
    assemble,
    groups_of,
)
from zo2adapters.models.conversion import quantize
from zo2core import Distribution, Engine, MeZOSGD, PhiloxNoise, ZerothOrder, ZO2Error
from zo2core.errors import (
    BatchError,
    CheckpointError,
    MissingPackageError,
    NonFiniteLossError,
    OptionError,
    OutputError,
    UnsupportedModelError,
)
from zo2core.kernels import fill

needs_executorch = pytest.mark.skipif(
    importlib.util.find_spec("executorch") is None, reason="executorch is an extra"
)
FA = ("lora_A",)
SEED, ZO_EPS, LR, STEPS = 5, 1e-2, 2e-3, 20
ROWS, TOKENS = 2, 9
# Losses of about 4 differ in their last bits, projected gradients by that over 2 zo_eps, B by LR
# times that a step.
CLOSE, CLOSE_GRADS = 1e-5, 1e-3


def opened(
    folder: Path, model_type: str = "llama", *, frozen: tuple[str, ...] = FA, **changes: Any
) -> HFBlockModel:
    """A tiny checkpoint, opened with a new adapter whose B is not zero."""
    base = folder / model_type
    if not base.exists():
        save_model(base, small_config(model_type, **changes))
    config = lora(target_modules=TARGETS[model_type], init_lora_weights=False)
    return open_checkpoint(base, adapter=Adapter(config=config, frozen=frozen, seed=1))


def step_of(model: HFBlockModel, **changes: Any) -> TrainingStep:
    return assemble(
        model, **{"rows": ROWS, "tokens": TOKENS, "zo_eps": ZO_EPS, "seed": SEED, **changes}
    ).step


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Batches of the program's shape, without padding."""
    made = [make_batch(40, [TOKENS] * ROWS, seed=seed) for seed in range(count)]
    return [{"input_ids": batch["input_ids"], "labels": batch["labels"]} for batch in made]


def taken(
    step: TrainingStep, batch: Mapping[str, torch.Tensor], lr: float = LR
) -> tuple[torch.Tensor, float, int]:
    with torch.inference_mode():
        losses, projected_grad, seed = step(batch["input_ids"], batch["labels"], torch.tensor(lr))
    return losses.clone(), float(projected_grad), int(seed)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=CLOSE)


def draw(z: torch.Tensor, seed: int, parameter: int) -> None:
    fill(z, Distribution.RADEMACHER, seed, parameter)


def peft_whole(folder: Path, model_type: str, model: HFBlockModel) -> PreTrainedModel:
    config = lora(target_modules=TARGETS[model_type], init_lora_weights=False)
    return monolithic(folder / model_type, config, values_of(model), FA)


def trained(whole: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter for name, parameter in whole.named_parameters() if parameter.requires_grad
    }


def split(adapter: torch.Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """B by its name, of a state: each begins at a whole group."""
    values, start = {}, 0
    for name, shape in shapes.items():
        values[name] = adapter[start : start + shape.numel()].view(shape)
        start += groups_of(shape.numel()) * GROUP
    assert start == adapter.numel()
    return values


def assert_close_adapter(step: TrainingStep, whole: nn.Module) -> None:
    expected = trained(whole)
    values = split(
        step.state.adapter, {name: parameter.shape for name, parameter in expected.items()}
    )
    for name, parameter in expected.items():
        assert_close(values[name], parameter.data)


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 7, 2**32 - 1, 2**40 + 3, 2**63 - 1])
def test_signs_are_the_engines_noise(seed: int) -> None:
    drawn = Signs([3, 70_001], [2 * GROUP + 1, 36])(torch.tensor(seed))
    assert drawn.numel() == 4 * GROUP
    for start, index, size in ((0, 3, 2 * GROUP + 1), (3 * GROUP, 70_001, 36)):
        z = torch.empty(size)
        draw(z, seed, index)
        assert torch.equal(drawn[start : start + size], z)


@pytest.mark.parametrize("model_type", TARGETS)
def test_a_step_is_lora_fa_perturbed_in_its_weights(model_type: str, tmp_path: Path) -> None:
    model = opened(tmp_path, model_type)
    step, whole = step_of(model), peft_whole(tmp_path, model_type, model)
    loop = MonolithicMeZO(whole, lr=LR, zo_eps=ZO_EPS, perturb_in_place=False, draw=draw)
    first = step.state.adapter.clone()
    for at, batch in enumerate(batches(STEPS)):
        losses, projected_grad, seed = taken(step, batch)
        expected = loop.step(batch, SEED + at)
        assert_close(losses, torch.tensor(expected.losses))
        assert projected_grad == pytest.approx(expected.projected_grads[0], abs=CLOSE_GRADS)
        assert seed == SEED + at
    assert_close_adapter(step, whole)
    assert (step.state.adapter - first).abs().max() > 500 * CLOSE


def test_steps_are_those_of_algorithm_1_with_the_same_noise(tmp_path: Path) -> None:
    """P-RGE's Algorithm 1, line by line: two copies of B, and the last step's projected gradient
    comes with the next.
    """
    model = opened(tmp_path)
    step, whole = step_of(model), peft_whole(tmp_path, "llama", model)
    places = {name: place for place, (name, _) in enumerate(whole.named_parameters())}
    copies = {
        name: [parameter.data.clone(), parameter.data.clone()]
        for name, parameter in trained(whole).items()
    }

    def apply_update(projected_grad: float, seed: int | None) -> None:
        for name, (plus, minus) in copies.items():
            diff = (plus - minus) / 2
            update = LR * projected_grad * diff / ZO_EPS
            z = torch.zeros_like(diff)
            if seed is not None:
                draw(z.view(-1), seed, places[name])
            copies[name] = [plus - diff - update + ZO_EPS * z, minus + diff - update - ZO_EPS * z]

    projected_grad = 0.0
    for at, batch in enumerate(batches(STEPS)):
        apply_update(projected_grad, SEED + at)
        losses = []
        for side in (0, 1):
            for name, parameter in trained(whole).items():
                parameter.data = copies[name][side]
            with torch.inference_mode():
                losses.append(float(whole(**batch).loss))
        projected_grad = (losses[0] - losses[1]) / (2 * ZO_EPS)
        assert_close(taken(step, batch)[0], torch.tensor(losses))
    apply_update(projected_grad, None)
    for name, parameter in trained(whole).items():
        parameter.data = copies[name][0]
    assert_close_adapter(step, whole)


def told_engine(model: HFBlockModel) -> Engine:
    estimator = MeZOSGD(lr=LR, zo_eps=ZO_EPS, perturb_in_place=False)
    return Engine(model, ZerothOrder(estimator, noise=PhiloxNoise(Distribution.RADEMACHER)))


def test_an_engine_that_is_told_the_losses_has_the_same_adapter_bit_for_bit(tmp_path: Path) -> None:
    step = step_of(opened(tmp_path))
    with told_engine(opened(tmp_path)) as engine:
        for batch in batches(5):
            losses, projected_grad, seed = taken(step, batch)
            engine.ask(seed=seed)
            assert engine.tell(losses).projected_grads == (projected_grad,)
        now = {name: value.clone() for name, value in engine.parameters_now() if ".lora_B." in name}
    values = split(step.state.adapter, {name: value.shape for name, value in now.items()})
    assert all(torch.equal(values[name], now[name]) for name in now)


def test_a_step_changes_its_state_alone_and_not_the_adapter_where_losses_are_not_finite(
    tmp_path: Path,
) -> None:
    model, [batch] = opened(tmp_path), batches(1)
    step = step_of(model)
    before = {name: value.clone() for name, value in step.state_dict().items()}
    taken(step, batch)
    changed = {
        name for name, value in step.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == {"state.adapter", "state.seed"}
    with told_engine(model) as used, told_engine(opened(tmp_path)) as fresh:
        assert used.step(batch, seed=0).losses == fresh.step(batch, seed=0).losses, (
            "the opened model stays as it is"
        )
    step = step_of(opened(tmp_path), zo_eps=1e38)
    _, projected_grad, _ = taken(step, batch)
    assert not abs(projected_grad) < float("inf")
    assert torch.equal(step.state.adapter, before["state.adapter"])
    assert step.state.seed == SEED + 1


def quantised(folder: Path) -> HFBlockModel:
    save_model(folder / "base", small_config("llama"))
    quantize(folder / "base", folder / "nf4", "nf4")
    return open_checkpoint(folder / "nf4", adapter=Adapter(config=lora(), frozen=FA))


@pytest.mark.parametrize(
    ("make", "error", "found"),
    [
        (
            lambda path: open_checkpoint(save_model(path / "base", small_config())),
            UnsupportedModelError,
            "without an adapter",
        ),
        (
            lambda path: opened(path, frozen=()),
            OptionError,
            "lora_A.default.weight, which is trained",
        ),
        (
            lambda path: opened(path, frozen=("lora_A", "layers.0")),
            OptionError,
            "lora_B.default.weight, which is frozen",
        ),
        (quantised, UnsupportedModelError, "a quantised weight (NF4Blocks)"),
    ],
    ids=["no-adapter", "all-of-lora", "a-layer-frozen", "quantised"],
)
def test_others_are_refused(
    make: Callable[[Path], HFBlockModel], error: type[ZO2Error], found: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as refusal:
        step_of(make(tmp_path))
    assert found in str(refusal.value)


def test_a_layer_that_sees_other_rows_is_refused_by_name() -> None:
    layer = DualForwardLinear(
        nn.Linear(4, 3), torch.zeros(2, 4), 1.0, path="experts.0", batch=(4, 9)
    )
    assert layer(torch.zeros(4, 9, 4)).shape == (4, 9, 3)
    assert layer(torch.zeros(36, 4)).shape == (36, 3)
    with pytest.raises(
        UnsupportedModelError,
        match=r"^experts\.0: found a layer that is called with shape \(20, 4\)",
    ):
        layer(torch.zeros(20, 4))


def test_what_is_not_installed_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("executorch.exir", "executorch.runtime"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=r"zo2core\[executorch\]"):
        write_program(tmp_path / "program.pte", opened(tmp_path), rows=1, tokens=4, zo_eps=ZO_EPS)
    with pytest.raises(MissingPackageError, match=r"zo2core\[executorch\]"):
        TrainingProgram(tmp_path / "program.pte")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edge")


@pytest.fixture(scope="module")
def written(folder: Path) -> Iterator[Path]:
    """A program whose forward is XNNPACK's; lowering one takes ten seconds."""
    path = folder / "program.pte"
    model = opened(folder, num_hidden_layers=1)
    write_program(path, model, rows=ROWS, tokens=TOKENS, zo_eps=ZO_EPS, seed=SEED)
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before, "running a program does not write it"


@needs_executorch
def test_the_runtimes_trajectory_is_the_modules(written: Path, folder: Path) -> None:
    program, step = TrainingProgram(written), step_of(opened(folder))
    assert torch.equal(program.state().adapter, step.state.adapter)
    assert program.state().seed == SEED
    for batch in batches(STEPS):
        lr = LR if batch["input_ids"][0, 0] % 2 else LR / 3  # an input of each step
        losses, projected_grad, seed = taken(step, batch, lr)
        report = program.step(batch, lr=lr)
        assert_close(report.losses, losses)
        assert report.projected_grad == pytest.approx(projected_grad, abs=CLOSE_GRADS)
        assert report.seed == seed
    assert_close(program.state().adapter, step.state.adapter)
    assert program.state().seed == SEED + STEPS
    assert TrainingProgram(written).state().seed == SEED, "each object has a state of its own"
    for given, rows, tokens in (
        (make_batch(40, [6]), 1, 6),
        (make_batch(40, [7, 4], seed=3), 2, 7),
    ):
        # smaller batches
        expected = taken(step_of(opened(folder), rows=rows, tokens=tokens), given)[0]
        assert_close(TrainingProgram(written).step(given, lr=LR).losses, expected)


@needs_executorch
def test_portable_kernels_take_the_same_steps(folder: Path, tmp_path: Path) -> None:
    model = opened(folder)
    write_program(
        tmp_path / "portable.pte",
        model,
        rows=1,
        tokens=5,
        zo_eps=ZO_EPS,
        seed=SEED,
        partitioners=(),
    )
    program, step = TrainingProgram(tmp_path / "portable.pte"), step_of(model, rows=1, tokens=5)
    for seed in range(5):
        batch = make_batch(40, [5], seed=seed)
        assert_close(program.step(batch, lr=LR).losses, taken(step, batch)[0])
    assert_close(program.state().adapter, step.state.adapter)


@needs_executorch
def test_an_engine_that_is_told_a_programs_losses_exports_its_adapter(
    written: Path, folder: Path, tmp_path: Path
) -> None:
    program = TrainingProgram(written)
    with told_engine(opened(folder)) as engine:
        for batch in batches(5):
            report = program.step(batch, lr=LR)
            engine.ask(seed=report.seed)
            assert engine.tell(report.losses).projected_grads == (report.projected_grad,)
        engine.export(tmp_path / "engine")
    program.save_adapter(tmp_path / "program")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "program" / name).read_bytes() == (
            tmp_path / "engine" / name
        ).read_bytes()
    with pytest.raises(OutputError):
        program.save_adapter(tmp_path / "program")


@needs_executorch
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
def test_peft_loads_what_a_program_saves_to_the_same_loss(
    written: Path, folder: Path, tmp_path: Path
) -> None:
    peft: Any = pytest.importorskip("peft")
    program = TrainingProgram(written)
    for batch in batches(3):
        program.step(batch, lr=LR)
    program.save_adapter(tmp_path / "adapter")
    [batch] = batches(1)
    plus, minus = program.step(batch, lr=0.0).losses
    base = AutoModelForCausalLM.from_pretrained(folder / "llama")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.inference_mode():
        # to the curvature
        assert float(model(**batch).loss) == pytest.approx(float(plus + minus) / 2, abs=1e-3)
    first = values_of(opened(folder))
    for name, value in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items():
        before = first[name.removeprefix("base_model.model.").replace(".weight", ".default.weight")]
        assert torch.equal(value, before) == (".lora_A." in name)


@needs_executorch
def test_a_restored_state_goes_on_bit_for_bit_and_that_of_another_adapter_is_refused(
    written: Path,
) -> None:
    program = TrainingProgram(written)
    first, *rest = batches(4)
    program.step(first, lr=LR)
    state = program.state()
    for wrong in (
        state._replace(adapter=torch.zeros(3)),
        state._replace(seed=-1),
        state._replace(seed=2**63),
    ):
        with pytest.raises(OptionError, match=r"^state\."):
            program.restore(wrong)
    assert program.state().seed == state.seed
    reports = [program.step(batch, lr=LR) for batch in rest]
    after = program.state()
    other = TrainingProgram(written)
    for again in (program, other):
        again.restore(state)
        assert again.state().seed == state.seed
        repeated = [again.step(batch, lr=LR) for batch in rest]
        assert [report.seed for report in repeated] == [report.seed for report in reports]
        assert all(
            torch.equal(one.losses, two.losses) for one, two in zip(reports, repeated, strict=True)
        )
        assert torch.equal(again.state().adapter, after.adapter)


def bad_batches() -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    good, padded = make_batch(40, [TOKENS] * ROWS), make_batch(40, [7, 4])
    left = make_batch(40, [7, 4], left=True)
    return {
        "rows": (make_batch(40, [5] * (ROWS + 1)), "3 rows"),
        "tokens": (make_batch(40, [TOKENS + 1]), "10 tokens"),
        "no-labels": ({"input_ids": good["input_ids"]}, "no labels"),
        "nothing-to-learn": (
            {**good, "labels": torch.full_like(good["labels"], -100)},
            "no token to predict",
        ),
        "vocabulary": ({**good, "input_ids": good["input_ids"] + 40}, "token 40"),
        "labels-of-another-shape": ({**good, "labels": good["labels"][:, 1:]}, "shape (2, 8)"),
        "padded-at-the-left": (left, "masked tokens before other tokens"),
        "masked-labels": ({**padded, "labels": padded["input_ids"]}, "or that have labels"),
        "another-entry": (
            {**good, "position_ids": torch.arange(TOKENS).expand(ROWS, -1)},
            "position_ids: found an entry",
        ),
    }


@needs_executorch
@pytest.mark.parametrize("case", bad_batches())
def test_a_batch_that_the_program_cannot_take_is_refused(case: str, written: Path) -> None:
    batch, found = bad_batches()[case]
    program = TrainingProgram(written)
    with pytest.raises(BatchError) as refusal:
        program.step(batch, lr=LR)
    assert found in str(refusal.value)
    assert program.state().seed == SEED, "no step was taken"


@needs_executorch
def test_a_step_of_the_runtime_that_is_not_finite_leaves_the_adapter(written: Path) -> None:
    program = TrainingProgram(written)
    state = ProgramState(torch.full_like(program.state().adapter, 1e38), 7)
    program.restore(state)
    with pytest.raises(NonFiniteLossError, match="the step of seed 7"):
        program.step(batches(1)[0], lr=LR)
    assert torch.equal(program.state().adapter, state.adapter)
    for lr in (-1.0, float("nan"), float("inf")):
        with pytest.raises(OptionError, match=r"^lr: "):
            program.step(batches(1)[0], lr=lr)


@needs_executorch
@pytest.mark.parametrize("digested", [False, True], ids=["as it is", "with a digest"])
@pytest.mark.parametrize(
    "damage", ["missing", "empty", "text", "half", "end", "directory", "other", "flipped"]
)
def test_a_file_that_is_no_such_program_is_refused(
    *, damage: str, digested: bool, written: Path, tmp_path: Path
) -> None:
    path, whole = tmp_path / "damaged.pte", written.read_bytes()
    if damage == "directory":
        path.mkdir()
    elif damage != "missing":
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1  # of the weights: the runtime would not notice
        parts = {
            "empty": b"",
            "text": b"no program\n" * 99,
            "half": whole[: len(whole) // 2],
            "end": whole[:-4000],
        }
        parts |= {"other": whole.replace(b"restore\0", b"rest0re\0"), "flipped": bytes(flipped)}
        path.write_bytes(parts[damage])
        if digested and damage != "flipped":
            append_digest(path)
    with pytest.raises(CheckpointError) as refusal:
        TrainingProgram(path)
    assert str(path) in str(refusal.value)


@needs_executorch
def test_numbers_out_of_their_range_and_files_in_the_way_are_refused(
    written: Path, folder: Path, tmp_path: Path
) -> None:
    wrong = [
        ("rows", 0),
        ("rows", True),
        ("tokens", 1),
        ("tokens", 13),
        ("zo_eps", 0.0),
        ("seed", -1),
        ("seed", 2**63),
    ]
    for option, value in wrong:
        options: dict[str, Any] = {"rows": 1, "tokens": 4, "zo_eps": ZO_EPS, option: value}
        with pytest.raises(OptionError, match=rf"^{option}: "):
            write_program(tmp_path / "program.pte", opened(folder), **options)
    assert not (tmp_path / "program.pte").exists()
    for path in (written, tmp_path):
        with pytest.raises(OutputError, match="something at this path"):
            write_program(path, opened(folder), rows=1, tokens=4, zo_eps=ZO_EPS)


@needs_executorch
def test_what_cannot_be_exported_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_a_value(self: TrainingStep, *inputs: torch.Tensor) -> torch.Tensor:
        return inputs[2] if inputs[2] > 0 else -inputs[2]

    monkeypatch.setattr(TrainingStep, "forward", ask_a_value)
    with pytest.raises(UnsupportedModelError, match="a model that cannot be exported"):
        write_program(tmp_path / "program.pte", opened(folder), rows=1, tokens=4, zo_eps=ZO_EPS)
    assert not (tmp_path / "program.pte").exists()
