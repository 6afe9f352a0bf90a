"""Directions beside the activations: the stacked loop's bits, the dense directions' losses, and what cannot be done so."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_lines import refusal
from engines import assert_equal, behind_copies, memory, outcome, weights, zeroth_order
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, batches, make_batch, save_model, small_config
from profiles import examples
from runs import small_run
from stacked_loop import EPS, LR, StackedLoop
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
)
from zo2core import perturbation as factor_store
from zo2core.errors import BatchError, JournalError, OptionError, UnsupportedModelError
from zo2core.kernels import apply_drawing
from zo2core.perturbation import Factors, PerturbedParameter
from zo2core.types import Lane

MEZO = MeZOSGD(lr=LR, zo_eps=EPS, perturb_in_place=False)
BATCH = make_batch(40, [7, 4])


def load_whole(base: Path) -> PreTrainedModel:
    whole: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="auto")  # which is in evaluation mode
    return whole


def beside(base: Path, estimator: ZOEstimator = MEZO, *, rank: int = 2, period: int = 100, **options: Any) -> Engine:
    """An engine whose directions lie beside the activations."""
    of_model = {name: options.pop(name) for name in ("loss_chunk", "head", "precision") if name in options}
    perturbation = LowRankPerturbation(rank=rank, period=period)
    return zeroth_order(open_checkpoint(base, **of_model), estimator, perturbation=perturbation, **options)


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
    policy = memory(buckets, kept=kept if where == "bus" and overlap else None, budget=1 << 40)
    estimator = MultiQueryRGE(lr=LR, zo_eps=EPS, perturb_in_place=False, q=queries)
    options: dict[str, Any] = {"rank": rank, "period": period, "seed": 5, "noise": PhiloxNoise(distribution)}
    options |= {"loss_chunk": None, "journal": tmp / "journal.jsonl", "overlap": overlap, "memory": policy}
    options |= {"write_back": WriteBackPolicy(directory=tmp)} if keeps_periods else {}

    with (
        nullcontext("cpu") if where == "cpu" else behind_copies(1e-5) as device,
        patch.object(factor_store, "BESIDE_UP_TO", beside_up_to),
    ):
        engine = beside(base, estimator, device=device, **options)
        try:
            for done in between:
                seeds = list(dict.fromkeys(evaluation.seed for evaluation in engine.ask()))
                assert list(engine.step(batch).losses) == loop.step(batch, *seeds)
                if done == "evaluate":
                    [expected] = loop.losses(batch, [(0, 0.0)])
                    assert engine.evaluate([batch]).losses[0] == expected.item()
                elif done == "look":
                    list(engine.parameters_now())
                elif done == "flush":
                    engine.flush()
                elif done == "again":
                    engine.close()
                    engine = beside(base, estimator, device=device, **options)
            assert_equal(weights(engine), loop.weights())
        finally:
            engine.close()


def test_the_sums_of_several_periods_are_the_stacked_loops(tmp_path: Path) -> None:
    """As above, without drawing: seven steps in periods of two, from host memory to a device and nothing back."""
    base, noise = save_model(tmp_path / "base", small_config("llama", num_hidden_layers=4)), Distribution.RADEMACHER
    loop = StackedLoop(load_whole(base), 2, 2, noise)
    with behind_copies() as device:
        options: dict[str, Any] = {"noise": PhiloxNoise(noise), "device": device, "memory": memory(kept=0, budget=1 << 40)}
        with beside(base, period=2, loss_chunk=None, **options) as engine:
            for seed in range(7):
                result = engine.step(BATCH, seed=seed)
                assert list(result.losses) == loop.step(BATCH, seed)
                assert result.lanes[Lane.UPLOAD].nbytes > 0
                assert result.lanes[Lane.OFFLOAD].nbytes == 0
            assert_equal(weights(engine), loop.weights())


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
    base = save_model(tmp_path / "base", FAMILIES[model_type])
    whole = load_whole(base)
    loop = StackedLoop(load_whole(base), 2, 2, Distribution.GAUSSIAN)
    with beside(base, MultiQueryRGE(lr=LR, zo_eps=EPS, perturb_in_place=False, q=2), period=2, loss_chunk=chunk) as engine:
        for _ in range(5):
            theta, period = weights(engine), engine.version // 2
            result = engine.step(BATCH)
            for evaluation, loss in zip(engine.journal.updates[-1].evaluations, result.losses, strict=True):
                moved = {}
                for name, value in theta.items():
                    z = loop.draw(name, evaluation.seed, *(value.shape if value.dim() == 1 else (value.shape[0], 2)))
                    z = z if value.dim() == 1 else z @ loop.shared(name, period).T
                    moved[name] = value + evaluation.shift * EPS * z
                assert loss == pytest.approx(dense(whole, moved, BATCH), rel=1e-5)


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_row_has_a_direction_of_its_own(chunk: int | None, tmp_path: Path) -> None:
    base, batch = save_model(tmp_path / "base", small_config("opt")), make_batch(40, [7, 4, 6, 5])
    for q in (1, 2, 4):
        estimator = PerRowRGE(lr=LR, zo_eps=EPS, perturb_in_place=False, q=q)
        losses = []
        for perturbation in (LowRankPerturbation(rank=2), DensePerturbation()):
            model, noise = open_checkpoint(base, loss_chunk=chunk), PhiloxNoise(Distribution.GAUSSIAN)
            with Engine(model, ZerothOrder(estimator, noise=noise, perturbation=perturbation)) as engine:
                seeds = list(dict.fromkeys(evaluation.seed for evaluation in engine.ask()))
                losses.append(engine.step(batch).losses)
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
    base = save_model(tmp_path / "base", small_config("llama", num_hidden_layers=4))
    write_back = WriteBackPolicy(directory=tmp_path / "run", every=None)
    options: dict[str, Any] = {"journal": tmp_path / "run" / "journal.jsonl", "write_back": write_back}
    with beside(base, period=3, seed=5, memory=memory(2, budget=1 << 40), **options) as engine:
        for _ in range(7):
            engine.step(BATCH)
        loss = engine.evaluate([BATCH]).loss
        engine.export(tmp_path / "exported")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["journal.jsonl"]
    with Engine(open_checkpoint(base), journal=tmp_path / "run" / "journal.jsonl") as replayer:  # knows rank and period
        assert replayer.evaluate([BATCH]).loss == loss
    with torch.inference_mode():
        assert load_whole(tmp_path / "exported")(**BATCH).loss.item() == pytest.approx(loss, rel=1e-5)


def test_sums_are_kept_in_float32_where_the_base_has_16_bits(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), torch.bfloat16)
    with beside(base, MeZOSGD(lr=1e-7, zo_eps=EPS, perturb_in_place=False), period=1000) as engine:
        for _ in range(3):
            engine.step(BATCH)
        store = engine._runner.factors
        assert store is not None
        sums = store._sums["model.layers.0.mlp.up_proj.weight"].now
        assert sums.dtype is torch.float32
        assert 0 < sums.abs().max() < 1e-3, "too little for bfloat16 weights to show, and not lost"


PLAIN: dict[str, Any] = {"lr": LR, "zo_eps": EPS}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "walks": ({"estimator": MeZOSGD(**PLAIN, perturb_in_place=True)}, "perturb_in_place"),
    "decays": (
        {"estimator": Clipped(estimator=MeZOSGD(**PLAIN, perturb_in_place=False, weight_decay=0.1), value=1.0)},
        "weight_decay",
    ),
    "fzoo": ({"estimator": FZOO(**PLAIN, q=2), "noise": PhiloxNoise(Distribution.RADEMACHER)}, "fzoo"),
    "torch's noise": ({"noise": SequentialNoise(())}, "noise"),
    "replay on the host": ({"replay": "host"}, "replay"),
    "blocks written back": ({"write_back": WriteBackPolicy(directory="run", every=1)}, "write_back"),
    "mixed precision": ({"precision": "mixed"}, "precision"),
    **{f"rank {number}": ({"rank": number}, "rank") for number in (0, -1, 1.5, True)},
    **{f"period {number}": ({"period": number}, "period") for number in (0, -1, 1.5, True)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_heeded_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, (options, said) = save_model(tmp_path / "base", small_config("llama"), torch.bfloat16), REFUSED[case]
    with pytest.raises(OptionError, match=said):
        beside(base, **{"journal": "journal.jsonl", **options})
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", [MeZOSGD, MultiQueryRGE, PerRowRGE])
def test_an_estimator_perturbs_in_place_where_directions_are_in_the_weights_unless_told(
    kind: Any, wrapped: bool, base: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = PLAIN | ({} if kind is MeZOSGD else {"q": 2})
    for where, in_place in (("weights", True), ("beside", False)):
        perturbation = DensePerturbation() if in_place else LowRankPerturbation(rank=2)
        updates = []
        for told in ({"perturb_in_place": in_place}, {}):
            estimator: ZOEstimator = kind(**options, **told)
            estimator = Clipped(estimator=estimator, value=1.0) if wrapped else estimator
            path = tmp_path / f"{where}.jsonl"  # the second engine goes on with the journal of the first one
            with Engine(open_checkpoint(base), ZerothOrder(estimator, perturbation=perturbation), journal=path) as engine:
                engine.step(BATCH, seed=3)
                assert engine.journal.header is not None
                header = engine.journal.header["estimator"]
                updates.append(engine.journal.updates[-1])
            assert header.get("of", header)["perturb_in_place"] is in_place
        assert [update.perturb_in_place for update in updates] == [in_place] * 2


def test_a_model_is_left_as_it_was(base: Path) -> None:
    model = open_checkpoint(base)
    outcome(Engine(model, ZerothOrder(MEZO, perturbation=LowRankPerturbation(rank=2))), [BATCH])
    engines = (Engine(own, ZerothOrder(MEZO)) for own in (model, open_checkpoint(base)))
    ours, theirs = (outcome(engine, [BATCH] * 2) for engine in engines)
    assert ours[0] == theirs[0]


def test_stacks_are_the_runs_and_not_the_memorys(base: Path) -> None:
    estimator, move = MultiQueryRGE(**PLAIN, perturb_in_place=False, q=3), LowRankModules.perturb
    for stack, expected in ((None, [6]), (4, [4, 2]), (1, [1] * 6)):
        for activations in (1, "1GiB"):
            method = ZerothOrder(estimator, perturbation=LowRankPerturbation(rank=2, stack=stack))
            with (
                Engine(open_checkpoint(base), method, memory=MemoryPolicy(activations=activations)) as engine,
                patch.object(LowRankModules, "perturb", autospec=True, side_effect=move) as moves,
            ):
                engine.step(BATCH)
            assert [call.args[2] for call in moves.mock_calls][: len(expected)] == expected


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


def test_parts_that_a_caller_made_do_not_go_on_with_such_a_run(base: Path, tmp_path: Path) -> None:
    journal, noise = tmp_path / "journal.jsonl", PhiloxNoise(Distribution.GAUSSIAN)
    outcome(beside(base, journal=journal), [BATCH])
    model, device = open_checkpoint(base), HostDevice()
    with (
        closing(SegmentStore(model.weights, model.layouts, device.host_memory)) as source,
        pytest.raises(OptionError, match="source: found a run whose weights are not replayed where they are stored"),
    ):
        Engine(model, ZerothOrder(MEZO, noise=noise), source=source, device=device, journal=journal)


def test_rows_that_cannot_be_dealt_are_refused_and_losses_of_ones_own_where_they_are(base: Path) -> None:
    estimator = PerRowRGE(**PLAIN, perturb_in_place=False, q=2)
    with Engine(open_checkpoint(base), ZerothOrder(estimator)) as engine:
        evaluation, *_ = engine.ask()
        with pytest.raises(OptionError, match="not divided into groups"):
            list(engine.forwards([BATCH], at=evaluation))
    with beside(base, estimator) as engine:
        with pytest.raises(BatchError, match="3 rows for 2 directions"):
            engine.step(make_batch(40, [7, 4, 5]))
        assert engine.version == 0


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
def test_factors_that_were_not_brought_up_to_date_are_made_again(fails_at: int, base: Path) -> None:
    found = []
    for disturbed in (False, True):
        with beside(base, period=2) as engine:
            for _ in range(3):
                engine.step(BATCH)
            if disturbed:
                with patch.object(factor_store, "apply_drawing", Breaking(fails_at)), pytest.raises(KeyboardInterrupt):
                    engine.step(BATCH)
            engine.step(BATCH)
            found.append(weights(engine))
    assert_equal(*found)


def test_modules_that_cannot_take_a_direction_are_refused_by_name(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=40, hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=3, num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="experts"):
        beside(save_model(tmp_path / "base", config))


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


def test_a_journal_is_of_its_perturbation(base: Path, tmp_path: Path) -> None:
    journal, noise = tmp_path / "journal.jsonl", PhiloxNoise(Distribution.GAUSSIAN)
    outcome(beside(base, journal=journal), [BATCH])
    for other in (LowRankPerturbation(rank=3), LowRankPerturbation(rank=2, period=7), DensePerturbation()):
        with pytest.raises(JournalError, match="perturbation"):
            Engine(open_checkpoint(base), ZerothOrder(MEZO, noise=noise, perturbation=other), journal=journal)
    outcome(Engine(open_checkpoint(base), ZerothOrder(MEZO), journal=journal), [BATCH])  # as it was begun
