"""Directions beside the activations: the stacked loop's bits, the dense directions' losses, and what cannot be done so."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_lines import refusal
from engines import zeroth_order
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, batches, make_batch, save_model, small_config
from parity import assert_same_weights
from profiles import examples
from runs import small_run
from stacked_loop import EPS, LR, StackedLoop
from threaded_device import ThreadedDevice, ThreadedStreams
from toy import ToyBlockModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    GPT2Config,
    MixtralConfig,
    PreTrainedModel,
)

from zo2adapters import open_checkpoint
from zo2adapters.cli import main
from zo2adapters.models.low_rank import LowRankModules
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.trainer import Trainer
from zo2core import (
    FZOO,
    Clipped,
    DensePerturbation,
    Distribution,
    Engine,
    HostDevice,
    HostPlan,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    MultiQueryRGE,
    PerRowRGE,
    PhiloxNoise,
    SegmentStore,
    SequentialNoise,
    WriteBackPolicy,
    ZerothOrder,
    ZOEstimator,
    factors,
)
from zo2core.errors import BatchError, JournalError, OptionError, UnsupportedModelError
from zo2core.kernels import apply_drawing
from zo2core.perturbation import Factors, PerturbedParameter
from zo2core.planning.memory import DevicePlan
from zo2core.types import Lane

MEZO = MeZOSGD(lr=LR, zo_eps=EPS, perturb_in_place=False)


def load_whole(base: Path) -> PreTrainedModel:
    whole: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="auto")  # which is in evaluation mode
    return whole


@pytest.mark.few(2)
@pytest.mark.parametrize("model_type", CONFIGS)
@examples(short=4, long=33)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rank=st.integers(1, 3),
    period=st.sampled_from([1, 2, 3, 100]),
    queries=st.integers(1, 3),
    distribution=st.sampled_from(list(Distribution)),
    buckets=st.sampled_from([None, 2, 3]),
    where=st.sampled_from(["cpu", "bus"]),
    kept=st.integers(0, 1),
    overlap=st.booleans(),
    keeps_periods=st.booleans(),
    beside_up_to=st.sampled_from([0.05, 10.0]),
    between=st.lists(st.sampled_from(["nothing", "evaluate", "look", "flush", "again"]), min_size=4, max_size=4),
)
def test_a_run_is_the_stacked_loop(
    model_type: str,
    data: st.DataObject,
    dtype: torch.dtype,
    rank: int,
    period: int,
    queries: int,
    distribution: Distribution,
    buckets: int | None,
    where: str,
    kept: int,
    overlap: bool,
    keeps_periods: bool,
    beside_up_to: float,
    between: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tmp = tmp_path_factory.mktemp("beside")
    config = data.draw(CONFIGS[model_type])
    batch = data.draw(batches(config.vocab_size))
    base = save_model(tmp / "base", config, dtype)
    loop = StackedLoop(load_whole(base), rank, period, distribution, run_seed=5)
    kept = kept if overlap and config.num_hidden_layers > 1 else 0
    device = HostDevice() if where == "cpu" else ThreadedDevice(ThreadedStreams(lambda lane, nbytes: nbytes * 1e-7))
    plan: Any = DevicePlan((), 1 << 40, kept, 1 << 28) if where == "bus" and overlap else "auto"

    def opened() -> Engine:
        return Engine(
            open_checkpoint(base, loss_chunk=None),
            ZerothOrder(
                MultiQueryRGE(lr=LR, zo_eps=EPS, perturb_in_place=False, q=queries),
                noise=PhiloxNoise(distribution),
                seed=5,
                perturbation=LowRankPerturbation(rank=rank, period=period),
            ),
            journal=tmp / "journal.jsonl",
            device=device,
            overlap=overlap,
            memory=MemoryPolicy(host=HostPlan((), 1 << 40, buckets, keep_noise=False), device=plan),
            write_back=WriteBackPolicy(directory=tmp) if keeps_periods else None,
        )

    with closing(device), patch.object(factors, "BESIDE_UP_TO", beside_up_to):
        engine = opened()
        try:
            for done in between:
                evaluations = engine.ask()
                seeds = list(dict.fromkeys(evaluation.seed for evaluation in evaluations))
                result = engine.step(batch)
                assert list(result.losses) == loop.step(batch, *seeds)
                if done == "evaluate":
                    [expected] = loop.losses(batch, [(0, 0.0)])
                    assert engine.evaluate([batch]).losses[0] == expected.item()
                elif done == "look":
                    list(engine.parameters_now())
                elif done == "flush":
                    engine.flush()
                elif done == "again":
                    engine.close()
                    engine = opened()
            weights = loop.weights()
            assert_same_weights(engine.parameters_now(), weights.items())
        finally:
            engine.close()


def test_the_sums_of_several_periods_are_the_stacked_loops(tmp_path: Path) -> None:
    """As above, without drawing: seven steps in periods of two, from host memory to a device and nothing back."""
    base, batch = save_model(tmp_path / "base", small_config("llama", num_hidden_layers=4)), make_batch(40, [7, 4])
    loop = StackedLoop(load_whole(base), 2, 2, Distribution.RADEMACHER)
    with (
        closing(ThreadedDevice(ThreadedStreams(lambda lane, nbytes: 0.0))) as device,
        beside(
            base,
            period=2,
            loss_chunk=None,
            noise=PhiloxNoise(Distribution.RADEMACHER),
            device=device,
            memory=MemoryPolicy(device=DevicePlan((), 1 << 40, 0, 1 << 28)),
        ) as engine,
    ):
        for seed in range(7):
            result = engine.step(batch, seed=seed)
            assert list(result.losses) == loop.step(batch, seed)
            assert result.lanes[Lane.UPLOAD].nbytes > 0
            assert result.lanes[Lane.OFFLOAD].nbytes == 0
        weights = loop.weights()
        assert_same_weights(engine.parameters_now(), weights.items())


def dense(whole: PreTrainedModel, moved: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> float:
    with torch.inference_mode():
        loss: float = torch.func.functional_call(whole, dict(moved), kwargs=dict(batch)).loss.item()
    return loss


FAMILIES = {
    **{name: small_config(name) for name in CONFIGS},
    "gpt2": GPT2Config(vocab_size=40, n_positions=12, n_embd=12, n_layer=2, n_head=3),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_losses_are_those_of_dense_directions(model_type: str, chunk: int | None, tmp_path: Path) -> None:
    """To the order in which floats are summed."""
    base, batch = save_model(tmp_path / "base", FAMILIES[model_type]), make_batch(40, [7, 4])
    whole = load_whole(base)
    loop = StackedLoop(load_whole(base), 2, 2, Distribution.GAUSSIAN)
    with beside(base, MultiQueryRGE(lr=LR, zo_eps=EPS, perturb_in_place=False, q=2), period=2, loss_chunk=chunk) as engine:
        for _ in range(5):
            theta, period = dict(engine_weights(engine)), engine.version // 2
            result = engine.step(batch)
            for evaluation, loss in zip(engine.journal.updates[-1].evaluations, result.losses, strict=True):
                moved = {}
                for name, value in theta.items():
                    z = loop.draw(name, evaluation.seed, *(value.shape if value.dim() == 1 else (value.shape[0], 2)))
                    z = z if value.dim() == 1 else z @ loop.shared(name, period).T
                    moved[name] = value + evaluation.shift * EPS * z
                assert loss == pytest.approx(dense(whole, moved, batch), rel=1e-5)


def beside(base: Path, estimator: ZOEstimator = MEZO, *, rank: int = 2, period: int = 100, **options: Any) -> Engine:
    """An engine whose directions lie beside the activations."""
    of_model = {name: options.pop(name) for name in ("loss_chunk", "head") if name in options}
    perturbation = LowRankPerturbation(rank=rank, period=period)
    return zeroth_order(open_checkpoint(base, **of_model), estimator, perturbation=perturbation, **options)


def engine_weights(engine: Engine) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) for name, tensor in engine.parameters_now()]


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_row_has_a_direction_of_its_own(chunk: int | None, tmp_path: Path) -> None:
    base, batch = save_model(tmp_path / "base", small_config("opt")), make_batch(40, [7, 4, 6, 5])
    for q in (1, 2, 4):
        estimator = PerRowRGE(lr=LR, zo_eps=EPS, perturb_in_place=False, q=q)
        losses, weights = [], []
        for perturbation in (LowRankPerturbation(rank=2), DensePerturbation()):
            model, noise = open_checkpoint(base, loss_chunk=chunk), PhiloxNoise(Distribution.GAUSSIAN)
            with Engine(model, ZerothOrder(estimator, noise=noise, perturbation=perturbation)) as engine:
                seeds = list(dict.fromkeys(evaluation.seed for evaluation in engine.ask()))
                losses.append(engine.step(batch).losses)
                weights.append(dict(engine_weights(engine)))
        rows = 4 // q
        loop = StackedLoop(load_whole(base), 2, 100, Distribution.GAUSSIAN)
        for number, loss in enumerate(losses[0]):
            own = {key: value[number // 2 * rows : (number // 2 + 1) * rows] for key, value in batch.items()}
            [expected] = loop.losses(own, [(seeds[number // 2], (1.0, -1.0)[number % 2])])
            assert loss == pytest.approx(expected.item(), rel=1e-5)
        for number, loss in enumerate(losses[1]):  # in the weights: MeZO's loop at these rows
            own = {key: value[number // 2 * rows : (number // 2 + 1) * rows] for key, value in batch.items()}
            theta = {
                name: value + (1.0, -1.0)[number % 2] * EPS * loop.draw(name, seeds[number // 2], *value.shape)
                for name, value in loop.base.items()
            }
            assert loss == pytest.approx(dense(load_whole(base), theta, own), rel=1e-5)


def test_nothing_is_written_and_a_journal_is_enough(tmp_path: Path) -> None:
    base, batch = save_model(tmp_path / "base", small_config("llama", num_hidden_layers=4)), make_batch(40, [7, 4])
    with beside(
        base,
        period=3,
        seed=5,
        journal=tmp_path / "run" / "journal.jsonl",
        memory=MemoryPolicy(host=HostPlan((), 1 << 40, 2, keep_noise=False)),
        write_back=WriteBackPolicy(directory=tmp_path / "run", every=None),
    ) as engine:
        for _ in range(7):
            engine.step(batch)
        loss = engine.evaluate([batch]).loss
        engine.export(tmp_path / "exported")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["journal.jsonl"]
    with Engine(open_checkpoint(base), journal=tmp_path / "run" / "journal.jsonl") as replayer:  # knows rank and period
        assert replayer.evaluate([batch]).loss == loss
    with torch.inference_mode():
        assert load_whole(tmp_path / "exported")(**batch).loss.item() == pytest.approx(loss, rel=1e-5)


def test_sums_are_kept_in_float32_where_the_base_has_16_bits(tmp_path: Path) -> None:
    base, batch = save_model(tmp_path / "base", small_config("llama"), torch.bfloat16), make_batch(40, [7, 4])
    with beside(base, MeZOSGD(lr=1e-7, zo_eps=EPS, perturb_in_place=False), period=1000) as engine:
        for _ in range(3):
            engine.step(batch)
        store = engine._runner.factors
        assert store is not None
        sums = store._sums["model.layers.0.mlp.up_proj.weight"].now
        assert sums.dtype is torch.float32
        assert 0 < sums.abs().max() < 1e-3, "too little for bfloat16 weights to show, and not lost"


def estimators() -> dict[str, tuple[ZOEstimator, str]]:
    plain: dict[str, Any] = {"lr": LR, "zo_eps": EPS}
    return {
        "walks": (MeZOSGD(**plain, perturb_in_place=True), "perturb_in_place"),
        "decays": (Clipped(estimator=MeZOSGD(**plain, perturb_in_place=False, weight_decay=0.1), value=1.0), "weight_decay"),
        "fzoo": (FZOO(**plain, q=2), "fzoo"),
    }


@pytest.mark.parametrize("name", estimators())
def test_estimators_that_cannot_be_heeded_are_refused(name: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    estimator, said = estimators()[name]
    with pytest.raises(OptionError, match=said):
        Engine(
            open_checkpoint(base),
            ZerothOrder(estimator, noise=PhiloxNoise(Distribution.RADEMACHER), perturbation=LowRankPerturbation(rank=2)),
            journal=tmp_path / "journal.jsonl",
        )
    assert not (tmp_path / "journal.jsonl").exists()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", [MeZOSGD, MultiQueryRGE, PerRowRGE])
def test_an_estimator_perturbs_in_place_where_directions_are_in_the_weights_unless_told(
    kind: Any, wrapped: bool, tmp_path: Path
) -> None:
    base, batch = save_model(tmp_path / "base", small_config("llama")), make_batch(40, [7, 4])
    options: dict[str, Any] = {"lr": LR, "zo_eps": EPS} | ({} if kind is MeZOSGD else {"q": 2})
    for where, in_place in (("weights", True), ("beside", False)):
        perturbation = DensePerturbation() if in_place else LowRankPerturbation(rank=2)
        updates = []
        for told in ({"perturb_in_place": in_place}, {}):
            estimator: ZOEstimator = kind(**options, **told)
            estimator = Clipped(estimator=estimator, value=1.0) if wrapped else estimator
            path = tmp_path / f"{where}.jsonl"  # the second engine goes on with the journal of the first one
            with Engine(open_checkpoint(base), ZerothOrder(estimator, perturbation=perturbation), journal=path) as engine:
                engine.step(batch, seed=3)
                assert engine.journal.header is not None
                header = engine.journal.header["estimator"]
                updates.append(engine.journal.updates[-1])
            assert header.get("of", header)["perturb_in_place"] is in_place
        assert [update.perturb_in_place for update in updates] == [in_place] * 2


def test_a_model_is_left_as_it_was(tmp_path: Path) -> None:
    base, batch = save_model(tmp_path / "base", small_config("llama")), make_batch(40, [7, 4])
    estimator, model = MEZO, open_checkpoint(base)
    with Engine(model, ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2))) as engine:
        engine.step(batch)
    with Engine(model, ZerothOrder(estimator)) as engine, Engine(open_checkpoint(base), ZerothOrder(estimator)) as other:
        for _ in range(2):
            assert engine.step(batch).losses == other.step(batch).losses


def test_stacks_are_the_runs_and_not_the_memorys(tmp_path: Path) -> None:
    base, batch = save_model(tmp_path / "base", small_config("llama")), make_batch(40, [7, 4])
    estimator, move = MultiQueryRGE(lr=LR, zo_eps=EPS, perturb_in_place=False, q=3), LowRankModules.perturb
    for stack, expected in ((None, [6]), (4, [4, 2]), (1, [1] * 6)):
        for activations in (1, "1GiB"):
            sizes: list[int] = []

            with (
                Engine(
                    open_checkpoint(base),
                    ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2, stack=stack)),
                    memory=MemoryPolicy(activations=activations),
                ) as engine,
                patch.object(LowRankModules, "perturb", autospec=True, side_effect=move) as moves,
            ):
                engine.step(batch)
                sizes = [call.args[2] for call in moves.mock_calls]
            assert sizes[: len(expected)] == expected


HEADS = {"sequence-classification": AutoModelForSequenceClassification, "question-answering": AutoModelForQuestionAnswering}


@pytest.mark.parametrize("head", HEADS)
def test_other_heads_run_one_evaluation_at_a_time(head: str, tmp_path: Path) -> None:
    config, base = small_config("llama", num_labels=2, pad_token_id=0), tmp_path / "base"
    HEADS[head].from_config(config).save_pretrained(base)  # type: ignore[no-untyped-call]
    batch = {"input_ids": torch.arange(3, 13).view(2, 5)}
    positions = {key: torch.tensor([1, 2]) for key in ("start_positions", "end_positions")}
    batch |= {"labels": torch.tensor([0, 1])} if head == "sequence-classification" else positions
    with beside(base, head=head) as engine:
        losses = engine.step(batch).losses
    assert losses[0] != losses[1]


def test_parts_that_a_caller_made_do_not_go_on_with_such_a_run(tmp_path: Path) -> None:
    base, journal = save_model(tmp_path / "base", small_config("llama")), tmp_path / "journal.jsonl"
    estimator, noise = MEZO, PhiloxNoise(Distribution.GAUSSIAN)
    with beside(base, estimator, journal=journal) as engine:
        engine.step(make_batch(40, [7]))
    model, device = open_checkpoint(base), HostDevice()
    with (
        closing(SegmentStore(model.weights, model.layouts, device.host_memory)) as source,
        pytest.raises(OptionError, match="source: found a run whose weights are not replayed where they are stored"),
    ):
        Engine(model, ZerothOrder(estimator, noise=noise), source=source, device=device, journal=journal)


def test_losses_of_ones_own_are_refused_where_rows_are_dealt(tmp_path: Path) -> None:
    base, batch = save_model(tmp_path / "base", small_config("llama")), make_batch(40, [7, 4])
    with Engine(open_checkpoint(base), ZerothOrder(PerRowRGE(lr=LR, zo_eps=EPS, perturb_in_place=False, q=2))) as engine:
        evaluation, *_ = engine.ask()
        with pytest.raises(OptionError, match="not divided into groups"):
            list(engine.forwards([batch], at=evaluation))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--rank", "stack=2"], "stack of --rank"),
        (["--rank", "2:stack=0"], "stack of --rank"),
        (["--rank", "2", "--snapshot-every", "3"], "--rank"),
        (["--per-row", "--objective", "exact-match"], "--per-row"),
        (["--per-row", "--micro-batch-size", "1"], "--per-row"),
        (["--rank", "2", "--estimator", "mezo:exact"], "exact of --estimator"),
        (["--rank", "2", "--noise", "mezo"], "--noise"),
        (["--rank", "2", "--weight-decay", "0.1"], "--weight-decay"),
        (["--rank", "2", "--estimator", "fzoo", "--queries", "2"], "--estimator"),
        (["--rank", "2", "--write-back-every", "2"], "--write-back-every"),
        (["--rank", "2", "--precision", "mixed"], "--precision"),
    ],
)
def test_a_command_line_that_cannot_be_heeded_is_one_line(more: list[str], said: str, tmp_path: Path) -> None:
    options = small_run(tmp_path)
    train = "train", "--model", options.model, "--data", options.data, "--output", tmp_path / "run"
    assert refusal(*train, *more).startswith(f"zo2: {said}:")
    assert not (tmp_path / "run").exists()


def test_a_run_stacks_all_of_a_step_and_its_branch_keeps_its_rank(tmp_path: Path) -> None:
    options, move = small_run(tmp_path), LowRankModules.perturb
    train = ["train", "--model", options.model, "--data", str(options.data), "--lr", "1e-2", "--rank", "2"]
    with patch.object(LowRankModules, "perturb", autospec=True, side_effect=move) as moves:
        main([*train, "--output", str(tmp_path / "run"), "--steps", "2", "--queries", "2"])
    assert [call.args[2] for call in moves.mock_calls][:5] == [4] * 5
    branch = ["--resume", str(tmp_path / "run"), "--from-step", "1", "--output", str(tmp_path / "branch")]
    assert "--rank" in refusal("train", *branch, "--rank", "4")
    assert not (tmp_path / "branch").exists()


def test_memory_is_reserved_for_what_is_stacked(tmp_path: Path) -> None:
    reserved = []
    for stack in (1, 2, None):
        optimization = Optimization(lr=1e-2, rank=2, queries=2, stack=stack)
        (tmp_path / str(stack)).mkdir()
        with closing(Trainer(small_run(tmp_path / str(stack), optimization=optimization))) as trainer:
            reserved.append(trainer.engine._runner.activation_bytes)
    assert reserved[0] < reserved[1] < reserved[2]


class Breaking:
    """Interrupts after so many more calls."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *arguments: Any, **options: Any) -> None:
        apply_drawing(*arguments, **options)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("fails_at", [1, 5, 15])
def test_factors_that_were_not_brought_up_to_date_are_made_again(fails_at: int, tmp_path: Path) -> None:
    base, batch = save_model(tmp_path / "base", small_config("llama")), make_batch(40, [7, 4])
    estimator = MEZO
    weights = []
    for disturbed in (False, True):
        with beside(base, estimator, period=2) as engine:
            for _ in range(3):
                engine.step(batch)
            if disturbed:
                with patch.object(factors, "apply_drawing", Breaking(fails_at)), pytest.raises(KeyboardInterrupt):
                    engine.step(batch)
            engine.step(batch)
            weights.append(dict(engine_weights(engine)))
    assert_same_weights(weights[0].items(), weights[1].items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise": "sequential"}, "noise"),
        ({"replay": "host"}, "replay"),
        ({"write_back": 1}, "write_back"),
        ({"precision": "mixed"}, "precision"),
    ],
)
def test_options_that_cannot_be_heeded_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), torch.bfloat16)
    model = open_checkpoint(base, precision=options.pop("precision", "exact"))
    if "noise" in options:
        options["noise"] = SequentialNoise(model.layouts)
    if "write_back" in options:
        options["write_back"] = WriteBackPolicy(directory=tmp_path, every=1)
    with pytest.raises(OptionError, match=said):
        zeroth_order(model, MEZO, perturbation=LowRankPerturbation(rank=2), **options)


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_ranks_and_periods_that_are_none_are_refused(number: Any) -> None:
    with pytest.raises(OptionError, match="rank"):
        LowRankPerturbation(rank=number)
    with pytest.raises(OptionError, match="period"):
        LowRankPerturbation(rank=1, period=number)


def test_modules_that_cannot_take_a_direction_are_refused_by_name(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=40, hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=3, num_local_experts=2,
    )  # fmt: skip
    base = save_model(tmp_path / "base", config)
    with pytest.raises(UnsupportedModelError, match="experts"):
        Engine(open_checkpoint(base), ZerothOrder(MEZO, perturbation=LowRankPerturbation(rank=2)))


class TokensFirst(torch.nn.Module):
    """A layer that has tokens before rows inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.linear(x.transpose(0, 1)).transpose(0, 1)
        return mixed


def test_rows_in_another_order_are_refused() -> None:
    layer = TokensFirst()
    modules = LowRankModules(dict(layer.named_modules()))
    rows = torch.randn(2, 6, 4)
    modules.set_batch_shape(2, 6)
    expected = layer(rows)
    moved: dict[str, PerturbedParameter] = {"linear.weight": Factors(torch.zeros(2, 4, 1), torch.zeros(4, 1))}
    modules.perturb({**moved, "linear.bias": torch.zeros(2, 4)}, 2)
    with (
        torch.inference_mode(),
        pytest.raises(UnsupportedModelError, match=r"linear.*\[6, 2, 4\] in a batch of 2 rows of 6"),
    ):
        layer(rows)
    modules.perturb({}, 1)
    assert torch.equal(layer(rows), expected)


def test_a_model_that_does_not_stack_is_refused(tmp_path: Path) -> None:
    toy = ToyBlockModel(20, 8, 2, tied=True, dtype=torch.float32, file=tmp_path / "toy")
    with pytest.raises(OptionError, match="a model that stacks streams"):
        Engine(toy, ZerothOrder(MEZO, perturbation=LowRankPerturbation(rank=2)))


def test_a_journal_is_of_its_perturbation(tmp_path: Path) -> None:
    base, batch = save_model(tmp_path / "base", small_config("llama")), make_batch(40, [7])
    journal, estimator = tmp_path / "journal.jsonl", MEZO
    with beside(base, estimator, journal=journal) as engine:
        engine.step(batch)
    for other in (LowRankPerturbation(rank=3), LowRankPerturbation(rank=2, period=7), DensePerturbation()):
        with pytest.raises(JournalError, match="perturbation"):
            Engine(
                open_checkpoint(base),
                ZerothOrder(estimator, noise=PhiloxNoise(Distribution.GAUSSIAN), perturbation=other),
                journal=journal,
            )
    with Engine(open_checkpoint(base), ZerothOrder(estimator), journal=journal) as engine:  # as it was begun
        engine.step(batch)


def test_rows_that_cannot_be_dealt_are_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    with beside(base, PerRowRGE(lr=LR, zo_eps=EPS, perturb_in_place=False, q=2)) as engine:
        with pytest.raises(BatchError, match="3 rows for 2 directions"):
            engine.step(make_batch(40, [7, 4, 5]))
        assert engine.version == 0
