"""Directions beside the activations: the stacked loop's bits, what cannot be done so, and factors
of ended periods.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from command_lines import refusal
from engines import (
    assert_equal,
    behind_copies,
    kernels_in,
    memory,
    outcome,
    weights,
    zeroth_order,
)
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, batches, make_batch, save_model, small_config
from parity import BETWEEN, go_between
from profiles import examples
from runs import small_run
from toy import ToyBlockModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    GPT2Config,
    MixtralConfig,
    PreTrainedModel,
)
from whole_loops import EPS, LR, StackedLoop

from zo2adapters import open_checkpoint
from zo2adapters.cli import main
from zo2adapters.models.low_rank import LowRankModules
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.run_inputs import RunStart
from zo2adapters.trainers.trainer import open_run
from zo2core import (
    FZOO,
    Clipped,
    CustomSource,
    DensePerturbation,
    Distribution,
    Engine,
    EngineOptions,
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
from zo2core.errors import BatchError, JournalError, OptionError, UnsupportedModelError, ZO2Warning
from zo2core.estimators import factors as factor_store
from zo2core.estimators.factors import DATA, MANIFEST, kept_bytes_a_step, sum_elements
from zo2core.estimators.perturbation import Factors, PerturbedParameter
from zo2core.io import durable
from zo2core.io.direct_file import RangedFile
from zo2core.io.durable import RecordFile
from zo2core.journal.journal import Journal
from zo2core.kernels.dispatch import Kernel
from zo2core.sweep.visitor import ForwardVisitor
from zo2core.types import Lane, Program

MEZO = MeZOSGD(lr=LR, zo_eps=EPS, perturb_in_place=False)
BATCH = make_batch(40, [7, 4])


def load_whole(base: Path) -> PreTrainedModel:
    # which is in evaluation mode
    whole: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return whole


def beside(
    base: Path, estimator: ZOEstimator = MEZO, *, rank: int = 2, period: int = 100, **options: Any
) -> Engine:
    """An engine whose directions lie beside the activations."""
    of_model = {
        name: options.pop(name) for name in ("loss_chunk", "head", "precision") if name in options
    }
    perturbation = LowRankPerturbation(rank=rank, period=period)
    return zeroth_order(
        open_checkpoint(base, **of_model), estimator, perturbation=perturbation, **options
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("model_type", CONFIGS)
@examples(short=4, long=33)
@given(data=st.data())
def test_a_run_is_the_stacked_loop(
    model_type: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp, draw = tmp_path_factory.mktemp("beside"), data.draw
    rank, period, queries = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 3, 100])),
        draw(st.integers(1, 3)),
    )
    distribution, beside_up_to = (
        draw(st.sampled_from(list(Distribution))),
        draw(st.sampled_from([0.05, 10.0])),
    )
    buckets, where = draw(st.sampled_from([None, 2, 3])), draw(st.sampled_from(["cpu", "bus"]))
    kept, overlap, keeps_periods = draw(st.integers(0, 1)), draw(st.booleans()), draw(st.booleans())

    config = draw(CONFIGS[model_type])
    batch = draw(batches(config.vocab_size))
    base = save_model(tmp / "base", config, draw(st.sampled_from([torch.float32, torch.bfloat16])))
    loop = StackedLoop(load_whole(base), rank, period, distribution, run_seed=5)
    kept = kept if overlap and config.num_hidden_layers > 1 else 0
    policy = memory(buckets, kept=kept if where == "bus" and overlap else None, budget=1 << 40)
    estimator = MultiQueryRGE(lr=LR, zo_eps=EPS, perturb_in_place=False, q=queries)
    options: dict[str, Any] = {
        "rank": rank,
        "period": period,
        "seed": 5,
        "noise": PhiloxNoise(distribution),
    }
    options |= {
        "loss_chunk": None,
        "journal": tmp / "journal.jsonl",
        "overlap": overlap,
        "memory": policy,
    }
    options |= {"write_back": WriteBackPolicy(directory=tmp)} if keeps_periods else {}

    with (
        nullcontext("cpu") if where == "cpu" else behind_copies(1e-5) as device,
        patch.object(factor_store, "BESIDE_UP_TO", beside_up_to),
    ):
        make = partial(beside, base, estimator, device=device, **options)
        engine = make()
        try:
            for what in draw(st.lists(st.sampled_from(BETWEEN), min_size=4, max_size=4)):
                seeds = list(dict.fromkeys(evaluation.seed for evaluation in engine.ask()))
                result = engine.step(batch)
                assert list(result.losses) == loop.step(batch, *seeds)
                assert result.lanes[Lane.OFFLOAD].nbytes == 0
                engine = go_between(
                    what, engine, make, batch, lambda: loop.losses(batch, [(0, 0.0)])[0].item()
                )
            assert_equal(weights(engine), loop.weights())
        finally:
            engine.close()


def dense(
    whole: PreTrainedModel, moved: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> float:
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
def test_losses_are_those_of_dense_directions(
    model_type: str, chunk: int | None, tmp_path: Path
) -> None:
    """To the order in which floats are summed."""
    base = save_model(tmp_path / "base", FAMILIES[model_type])
    whole = load_whole(base)
    loop = StackedLoop(load_whole(base), 2, 2, Distribution.GAUSSIAN)
    with beside(
        base,
        MultiQueryRGE(lr=LR, zo_eps=EPS, perturb_in_place=False, q=2),
        period=2,
        loss_chunk=chunk,
    ) as engine:
        for _ in range(5):
            theta, period = weights(engine), engine.version // 2
            result = engine.step(BATCH)
            for evaluation, loss in zip(
                engine.journal.updates[-1].evaluations, result.losses, strict=True
            ):
                moved = {}
                for name, value in theta.items():
                    z = loop.draw(
                        name,
                        evaluation.seed,
                        *(value.shape if value.dim() == 1 else (value.shape[0], 2)),
                    )
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
            model, noise = (
                open_checkpoint(base, loss_chunk=chunk),
                PhiloxNoise(Distribution.GAUSSIAN),
            )
            with Engine(
                model, ZerothOrder(estimator, noise=noise, perturbation=perturbation)
            ) as engine:
                seeds = list(dict.fromkeys(evaluation.seed for evaluation in engine.ask()))
                losses.append(engine.step(batch).losses)
        rows = 4 // q
        loop = StackedLoop(load_whole(base), 2, 100, Distribution.GAUSSIAN)
        for number, loss in enumerate(losses[0]):
            own = {
                key: value[number // 2 * rows : (number // 2 + 1) * rows]
                for key, value in batch.items()
            }
            [expected] = loop.losses(own, [(seeds[number // 2], (1.0, -1.0)[number % 2])])
            assert loss == pytest.approx(expected.item(), rel=1e-5)
        for number, loss in enumerate(losses[1]):  # in the weights: MeZO's loop at these rows
            own = {
                key: value[number // 2 * rows : (number // 2 + 1) * rows]
                for key, value in batch.items()
            }
            theta = {
                name: value
                + (1.0, -1.0)[number % 2] * EPS * loop.draw(name, seeds[number // 2], *value.shape)
                for name, value in loop.base.items()
            }
            assert loss == pytest.approx(dense(load_whole(base), theta, own), rel=1e-5)


def test_nothing_is_written_and_a_journal_is_enough(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama", num_hidden_layers=4))
    write_back = WriteBackPolicy(directory=tmp_path / "run", every=None)
    options: dict[str, Any] = {
        "journal": tmp_path / "run" / "journal.jsonl",
        "write_back": write_back,
    }
    with beside(base, period=3, seed=5, memory=memory(2, budget=1 << 40), **options) as engine:
        for _ in range(7):
            engine.step(BATCH)
        loss = engine.evaluate([BATCH]).loss
        engine.export(tmp_path / "exported")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["journal.jsonl"]
    with Engine(open_checkpoint(base), journal=tmp_path / "run" / "journal.jsonl") as replayer:
        # knows rank and period
        assert replayer.evaluate([BATCH]).loss == loss
    with torch.inference_mode():
        assert load_whole(tmp_path / "exported")(**BATCH).loss.item() == pytest.approx(
            loss, rel=1e-5
        )


def test_sums_are_kept_in_float32_where_the_base_has_16_bits(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), torch.bfloat16)
    with beside(base, MeZOSGD(lr=1e-7, zo_eps=EPS, perturb_in_place=False), period=1000) as engine:
        for _ in range(3):
            engine.step(BATCH)
        store = engine._run.directions.factors
        assert store is not None
        sums = store._sums["model.layers.0.mlp.up_proj.weight"].now
        assert sums.dtype is torch.float32
        assert 0 < sums.abs().max() < 1e-3, "too little for bfloat16 weights to show, and not lost"


PLAIN: dict[str, Any] = {"lr": LR, "zo_eps": EPS}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "walks": ({"estimator": MeZOSGD(**PLAIN, perturb_in_place=True)}, "perturb_in_place"),
    "decays": (
        {
            "estimator": Clipped(
                estimator=MeZOSGD(**PLAIN, perturb_in_place=False, weight_decay=0.1), value=1.0
            )
        },
        "weight_decay",
    ),
    "fzoo": (
        {"estimator": FZOO(**PLAIN, q=2), "noise": PhiloxNoise(Distribution.RADEMACHER)},
        "fzoo",
    ),
    "torch's noise": ({"noise": SequentialNoise(())}, "noise"),
    "replay on the host": ({"replay": "host"}, "replay"),
    "blocks written back": (
        {"write_back": WriteBackPolicy(directory="run", every=1)},
        "write_back",
    ),
    "mixed precision": ({"precision": "mixed"}, "precision"),
    **{f"rank {number}": ({"rank": number}, "rank") for number in (0, -1, 1.5, True)},
    **{f"period {number}": ({"period": number}, "period") for number in (0, -1, 1.5, True)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_heeded_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base, (options, said) = (
        save_model(tmp_path / "base", small_config("llama"), torch.bfloat16),
        REFUSED[case],
    )
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
            # the second engine goes on with the journal of the first one
            path = tmp_path / f"{where}.jsonl"
            with Engine(
                open_checkpoint(base),
                ZerothOrder(estimator, perturbation=perturbation),
                journal=path,
            ) as engine:
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
                Engine(
                    open_checkpoint(base), method, memory=MemoryPolicy(activations=activations)
                ) as engine,
                patch.object(LowRankModules, "perturb", autospec=True, side_effect=move) as moves,
            ):
                engine.step(BATCH)
            assert [call.args[2] for call in moves.mock_calls][: len(expected)] == expected


HEADS = {
    "sequence-classification": AutoModelForSequenceClassification,
    "question-answering": AutoModelForQuestionAnswering,
}


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


def test_rows_that_cannot_be_dealt_are_refused_and_losses_of_ones_own_where_they_are(
    base: Path,
) -> None:
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
        (["--rank", "2", "--stack", "0"], "--stack"),
        (["--rank", "2", "--noise", "mezo"], "--noise"),
        (["--rank", "2", "--weight-decay", "0.1"], "--weight-decay"),
        (["--rank", "2", "--estimator", "fzoo", "--queries", "2"], "--estimator"),
        (["--rank", "2", "--write-back-every", "2"], "--write-back-every"),
        (["--rank", "2", "--precision", "mixed"], "--precision"),
    ],
)
def test_a_command_line_that_cannot_be_heeded_is_one_line(
    more: list[str], said: str, tmp_path: Path
) -> None:
    options = small_run(tmp_path)
    train = (
        "train",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        options.data,
        "--output",
        tmp_path / "run",
    )
    assert refusal(*train, *more).startswith(f"zo2: {said}:")
    assert not (tmp_path / "run").exists()


def test_a_run_stacks_all_of_a_step_and_its_branch_keeps_its_rank(tmp_path: Path) -> None:
    options, move = small_run(tmp_path), LowRankModules.perturb
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
        "--rank",
        "2",
    ]
    with patch.object(LowRankModules, "perturb", autospec=True, side_effect=move) as moves:
        main([*train, "--output", str(tmp_path / "run"), "--steps", "2", "--queries", "2"])
    assert [call.args[2] for call in moves.mock_calls][:5] == [4] * 5
    branch = [
        "--resume",
        str(tmp_path / "run"),
        "--from-step",
        "1",
        "--output",
        str(tmp_path / "branch"),
    ]
    assert "--rank" in refusal("train", *branch, "--rank", "4")
    assert not (tmp_path / "branch").exists()


def test_memory_is_reserved_for_what_is_stacked(tmp_path: Path) -> None:
    reserved = []
    for stack in (1, 2, None):
        optimization = Optimization(method="zeroth-order", lr=1e-2, rank=2, queries=2, stack=stack)
        (tmp_path / str(stack)).mkdir()
        with closing(
            open_run(RunStart(small_run(tmp_path / str(stack), optimization=optimization)))
        ) as trainer:
            reserved.append(trainer.engine._run.segments.activation_bytes)
    assert reserved[0] < reserved[1] < reserved[2]


@pytest.mark.parametrize("fails_at", [1, 5, 15])
def test_factors_that_were_not_brought_up_to_date_are_made_again(fails_at: int, base: Path) -> None:
    found, calls = [], count(1)

    def interrupting(kernel: Kernel, *arguments: Any) -> None:
        kernel(*arguments)
        if next(calls) == fails_at:
            raise KeyboardInterrupt

    for disturbed in (False, True):
        with beside(base, period=2) as engine:
            for _ in range(3):
                engine.step(BATCH)
            if disturbed:
                factors: Any = engine._run.directions.factors
                with (
                    patch.object(factors, "_apply", partial(interrupting, factors._apply)),
                    pytest.raises(KeyboardInterrupt),
                ):
                    engine.step(BATCH)
            engine.step(BATCH)
            found.append(weights(engine))
    assert_equal(*found)


def test_models_and_modules_that_cannot_take_a_direction_are_refused_by_name(
    tmp_path: Path,
) -> None:
    config = MixtralConfig(
        vocab_size=40,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=3,
        num_local_experts=2,
    )
    with pytest.raises(UnsupportedModelError, match="experts"):
        beside(save_model(tmp_path / "base", config))
    toy = ToyBlockModel(20, 8, 2, tied=True, dtype=torch.float32, file=tmp_path / "toy")
    with pytest.raises(OptionError, match="a model that stacks streams"):
        Engine(toy, ZerothOrder(MEZO, perturbation=LowRankPerturbation(rank=2)))


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
    modules.rows, modules.tokens = 2, 6
    expected = layer(rows)
    moved: dict[str, PerturbedParameter] = {
        "linear.weight": Factors(torch.zeros(2, 4, 1), torch.zeros(4, 1))
    }
    modules.perturb({**moved, "linear.bias": torch.zeros(2, 4)}, 2)
    with (
        torch.inference_mode(),
        pytest.raises(
            UnsupportedModelError, match=r"linear.*\[6, 2, 4\] in a batch of 2 rows of 6"
        ),
    ):
        layer(rows)
    modules.perturb({}, 1)
    assert torch.equal(layer(rows), expected)


def test_a_journal_is_of_its_perturbation(base: Path, tmp_path: Path) -> None:
    journal, noise = tmp_path / "journal.jsonl", PhiloxNoise(Distribution.GAUSSIAN)
    outcome(beside(base, journal=journal), [BATCH])
    for other in (
        LowRankPerturbation(rank=3),
        LowRankPerturbation(rank=2, period=7),
        DensePerturbation(),
    ):
        with pytest.raises(JournalError, match="perturbation"):
            Engine(
                open_checkpoint(base),
                ZerothOrder(MEZO, noise=noise, perturbation=other),
                journal=journal,
            )
    model, device = open_checkpoint(base), HostDevice()
    with (
        closing(SegmentStore(model.weights, model.layouts, device.host_memory)) as source,
        pytest.raises(
            OptionError,
            match="source: found a run whose weights are not replayed where they are stored",
        ),
    ):
        Engine(
            model,
            ZerothOrder(MEZO, noise=noise),
            device=device,
            journal=journal,
            options=EngineOptions(source=CustomSource(source)),
        )
    # as it was begun
    outcome(Engine(open_checkpoint(base), ZerothOrder(MEZO), journal=journal), [BATCH])


STEPS, PERIOD = 8, 3  # two periods have ended at step 6, which the sweep of step 7 sees


class Counting:
    def __init__(self) -> None:
        self.drawn = 0

    def __call__(
        self, kernel: Kernel, theta: torch.Tensor, program: Program, *arguments: Any
    ) -> None:
        self.drawn += len(program.seeds)
        kernel(theta, program, *arguments)


def opened(base: Path, run: Path, **policy: Any) -> Engine:
    return zeroth_order(
        open_checkpoint(base),
        MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False),
        perturbation=LowRankPerturbation(rank=2, period=PERIOD),
        journal=run / "journal.jsonl",
        write_back=WriteBackPolicy(directory=run, **policy),
    )


class Stopped(NamedTuple):
    """A base, a run of eight steps that was stopped, and the weights after one more step."""

    base: Path
    run: Path
    expected: dict[str, torch.Tensor]

    def copy(self, folder: Path, *, bare: bool = False) -> Path:
        """The run, with what it keeps of ended periods or without."""
        return shutil.copytree(
            self.run, folder, ignore=shutil.ignore_patterns("factors.*") if bare else None
        )

    def resume(self, run: Path, **policy: Any) -> int:
        """Take the ninth step, hold the weights against those of the whole run, and say how many
        directions were drawn.
        """
        drawing = Counting()
        with kernels_in(drawing):
            assert_equal(outcome(opened(self.base, run, **policy), [BATCH])[1], self.expected)
        return drawing.drawn

    def directions(self, steps: int) -> int:
        """How many are drawn to replay so many steps of all parameters, by the sweep of a step and
        a look at the weights.
        """
        model = open_checkpoint(self.base)
        model.weights.close()
        return (steps + 1) * sum(len(layout.parameters) for layout in model.layouts)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    tmp = tmp_path_factory.mktemp("periods")
    base = save_model(tmp / "base", small_config("llama"), torch.bfloat16)
    expected = outcome(opened(base, tmp / "whole"), [BATCH] * (STEPS + 1))[1]
    outcome(opened(base, tmp / "run"), [BATCH] * STEPS)
    return Stopped(base, tmp / "run", expected)


@pytest.fixture
def run(stopped: Stopped, tmp_path: Path) -> Path:
    return stopped.copy(tmp_path / "run")


def periods(run: Path) -> list[int]:
    """The last step of each period in the manifest."""
    return [json.loads(line)["version"] for line in (run / MANIFEST).read_bytes().splitlines()[1:]]


def test_a_resumed_run_draws_the_updates_of_the_open_period_alone(
    stopped: Stopped, run: Path, tmp_path: Path
) -> None:
    assert sorted(path.name for path in run.iterdir()) == [DATA, MANIFEST, "journal.jsonl"]
    model = open_checkpoint(stopped.base)
    model.weights.close()
    planned = kept_bytes_a_step(LowRankPerturbation(rank=2, period=PERIOD), model.layouts)
    assert (run / DATA).stat().st_size == 2 * PERIOD * planned
    assert stopped.resume(run) == stopped.directions(STEPS % PERIOD)
    assert periods(run) == [3, 6, 9], "the step after ended the third period"
    bare = stopped.copy(tmp_path / "bare", bare=True)
    assert stopped.resume(bare) == stopped.directions(STEPS)
    for name in (DATA, MANIFEST):
        assert (bare / name).read_bytes() == (run / name).read_bytes()


def flipped(at: float) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = bytearray((run / DATA).read_bytes())
        data[int(at * len(data))] ^= 1
        (run / DATA).write_bytes(data)

    return damage


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: int(len(data) * share)])

    return damage


def garbled(run: Path) -> None:
    lines = (run / MANIFEST).read_bytes().splitlines(keepends=True)
    (run / MANIFEST).write_bytes(
        b"".join([lines[0], lines[1].replace(b"version", b"Version"), lines[2]])
    )


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (flipped(0.0), 0),  # the first matrix, in the first period
        (flipped(0.4), 0),
        (flipped(0.6), 1),
        (flipped(0.9999), 1),  # a vector of the last segment: after all others were read
        (cut(DATA, 0.75), 1),
        (cut(DATA, 0.0), 0),
        (lambda run: (run / DATA).unlink(), 0),
        (garbled, 3),  # found before anything was read: the periods are kept anew
    ],
)
def test_damage_is_told_and_replayed(
    damage: Callable[[Path], None], left: int, stopped: Stopped, run: Path
) -> None:
    damage(run)
    with pytest.warns(ZO2Warning, match=r"factors\.jsonl: .* replayed from the journal"):
        drawn = stopped.resume(run)
    assert drawn > stopped.directions(STEPS % PERIOD)
    assert len(periods(run)) == left
    outcome(opened(stopped.base, run), [BATCH])  # whose sweep ends the periods again
    assert periods(run) == [3, 6, 9]


def test_what_the_system_refuses_is_told_and_costs_time_alone(
    stopped: Stopped, run: Path, tmp_path: Path
) -> None:
    opened_before = durable.open_regular

    def refusing(path: Path, *arguments: Any) -> Any:
        if path.name == DATA:
            raise OSError(24, "Too many open files")
        return opened_before(path, *arguments)

    with (
        patch.object(durable, "open_regular", refusing),
        pytest.warns(ZO2Warning, match=r"factors\.jsonl: Too many open files"),
    ):
        assert stopped.resume(run) == stopped.directions(STEPS)
    assert (run / MANIFEST).read_bytes() == (stopped.run / MANIFEST).read_bytes(), (
        "it may be read the next time"
    )
    piped = stopped.copy(tmp_path / "piped")
    (piped / DATA).unlink()
    os.mkfifo(piped / DATA)
    with pytest.warns(ZO2Warning, match="no regular file"):
        assert stopped.resume(piped) == stopped.directions(STEPS)
    bare = stopped.copy(tmp_path / "bare", bare=True)
    full = patch.object(RangedFile, "write", side_effect=OSError(28, "No space left on device"))
    with full, pytest.warns(ZO2Warning, match=r"factors\.jsonl: No space left on device"):
        assert stopped.resume(bare) == stopped.directions(STEPS)
    assert not (bare / MANIFEST).exists(), "no period counts whose bytes are not there"


def test_sums_of_ended_periods_are_written_as_they_end(stopped: Stopped, tmp_path: Path) -> None:
    bare = stopped.copy(tmp_path / "bare", bare=True)
    after_embedding: list[int] = []
    evaluate = ForwardVisitor._evaluate

    def evaluating(visitor: ForwardVisitor, index: int) -> None:
        if index == 0:
            after_embedding.append(sum(len(call.args[2]) for call in write.mock_calls))
        evaluate(visitor, index)

    with (
        opened(stopped.base, bare) as engine,
        patch.object(RangedFile, "write", autospec=True, side_effect=RangedFile.write) as write,
        patch.object(ForwardVisitor, "_evaluate", evaluating),
    ):
        engine.evaluate([BATCH])
    embedding = sum_elements(open_checkpoint(stopped.base).layouts[0].parameters, 2)
    assert after_embedding == [STEPS // PERIOD * 4 * sum(embedding.values())], (
        "nothing waits for other segments"
    )


def test_a_period_that_ended_since_the_first_read_can_be_read(stopped: Stopped, run: Path) -> None:
    with (run / DATA).open("ab") as file:
        file.write(bytes(1 << 14))  # of a period that was not counted
    with opened(stopped.base, run) as engine:
        while engine.version <= 3 * PERIOD:
            engine.step(BATCH)
        expected = weights(engine)
        store = engine._run.directions.factors
        assert store is not None
        store._sums.clear()  # as after a sweep that failed
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            now = weights(engine)
    assert_equal(now, expected)


def test_periods_count_as_far_as_a_manifest_goes_and_not_of_other_data(
    stopped: Stopped, run: Path, tmp_path: Path
) -> None:
    # the same options, the same header
    torn, other = stopped.copy(tmp_path / "torn"), [make_batch(40, [3, 9])] * STEPS
    cut(MANIFEST, 0.99)(torn)  # as a crash leaves it
    assert stopped.resume(torn) == stopped.directions(STEPS - PERIOD)
    assert periods(torn) == [3, 6, 9]
    outcome(opened(stopped.base, tmp_path / "other"), other)
    for name in (DATA, MANIFEST):
        shutil.copyfile(tmp_path / "other" / name, run / name)
    assert stopped.resume(run) == stopped.directions(STEPS)
    lost = stopped.copy(tmp_path / "lost")
    steps = (lost / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (lost / "journal.jsonl").write_bytes(b"".join(steps[:5]))
    with pytest.raises(
        JournalError, match=r"at least [36], since .*factors\.jsonl knows of step [25]"
    ):
        opened(stopped.base, lost)


def test_bytes_and_journal_are_durable_before_a_period_counts(stopped: Stopped, run: Path) -> None:
    order: list[str] = []

    def noting(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            order.append(what)
            return method(*arguments)

        return noted

    with (
        opened(stopped.base, run) as engine,
        patch.object(RangedFile, "sync", noting("bytes", RangedFile.sync)),
        patch.object(RecordFile, "append", noting("record", RecordFile.append)),
        patch.object(Journal, "chain", noting("journal", Journal.chain)),
    ):
        engine.step(BATCH)
        order.clear()
        engine.evaluate([BATCH])
    assert order[0] == "journal"
    assert order[-2:] == ["bytes", "record"]


@pytest.mark.parametrize("policy", [{"every": None}, {"terabytes_per_1000_steps": 1e-9}])
def test_what_may_not_be_written_is_still_read(
    policy: dict[str, Any], stopped: Stopped, run: Path, tmp_path: Path
) -> None:
    assert stopped.resume(run, **policy) == stopped.directions(STEPS % PERIOD)
    assert (run / MANIFEST).read_bytes() == (stopped.run / MANIFEST).read_bytes()
    bare = stopped.copy(tmp_path / "bare", bare=True)
    assert stopped.resume(bare, **policy) == stopped.directions(STEPS)
    assert [path.name for path in bare.iterdir()] == ["journal.jsonl"]
