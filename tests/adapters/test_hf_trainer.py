"""``transformers.Trainer`` and TRL's with zeroth-order steps: their data, losses, logs and
checkpoints, our bits.
"""

import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import families
import numpy as np
import pytest
import torch
from command_lines import done, write_rows
from models import LONGEST, WORDS, save_classifier, save_model, save_tokenizer, small_config
from parity import assert_same_weights
from profiles import short_first
from torch import nn
from trainers import OF_TRL, ROWS, VOCABULARY, Smoothed, trainer_options
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EarlyStoppingCallback,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LabelSmoother

import zo2core.engine
from zo2adapters import (
    CalledForward,
    LightningArguments,
    MonolithicMeZO,
    StreamedArguments,
    ZOTrainerMixin,
    open_checkpoint,
)
from zo2adapters.commands.train import Train
from zo2adapters.frameworks import arguments as framework_arguments
from zo2adapters.frameworks.saved_run import save_files
from zo2adapters.tasks.option_tree import declared
from zo2adapters.tasks.rows import RowReader, training_batches
from zo2adapters.trainers.optimization import Noise, Optimization
from zo2core import (
    Distribution,
    Engine,
    FirstOrder,
    Guarded,
    Journal,
    MeZOSGD,
    PhiloxNoise,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.checkpoint.export import write_checkpoint
from zo2core.errors import (
    BatchError,
    CheckpointError,
    JournalError,
    OptionError,
    OutputError,
    UnsupportedModelError,
)
from zo2core.optimizers.registry import make_block_update
from zo2core.ranges import EstimatorName

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
pytestmark = OF_TRL

ZOArguments = partial(StreamedArguments, method="zeroth-order")
EXACT = StreamedArguments(method="mezo", guard=False, zo_eps=1e-2)


def mixed(trainer: Any) -> Any:
    return type(f"ZO{trainer.__name__}", (ZOTrainerMixin, trainer), {})


class SmoothedStock(Smoothed, Trainer):
    pass


NOUNS = WORDS[3:]
PAIRS: list[dict[str, str]] = [
    {
        "prompt": " ".join(NOUNS[i % 5 : i % 5 + 3]),
        "completion": " " + " ".join([NOUNS[i * 3 % 7]] * (1 + i % 2)),
    }
    for i in range(12)
]
PREFERENCES = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": " " + NOUNS[(i * 5 + 1) % 7]}
    for i, row in enumerate(PAIRS)
]
CONSTANT: dict[str, Any] = {
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
}


class Kind(NamedTuple):
    """A stock trainer, its config and rows, and what it logs of its own."""

    stock: Any
    config: Any
    rows: Any
    logged: frozenset[str] = frozenset()
    auto_class: Any = AutoModelForCausalLM


OF_SFT = frozenset({"entropy", "mean_token_accuracy", "num_tokens"})
OF_DPO = frozenset({"rewards/accuracies", "rewards/margins", "logps/chosen"})
OF_REWARD = frozenset({"accuracy", "margin", "mean_reward"})
KINDS = {
    "plain": Kind(Trainer, TrainingArguments, ROWS),
    "smoothed": Kind(SmoothedStock, TrainingArguments, ROWS),
    "sft": Kind(trl.SFTTrainer, trl.SFTConfig, PAIRS, OF_SFT),
    "dpo": Kind(trl.DPOTrainer, trl.DPOConfig, PREFERENCES, OF_DPO),
    "reward": Kind(
        trl.RewardTrainer,
        trl.RewardConfig,
        PREFERENCES,
        OF_REWARD,
        AutoModelForSequenceClassification,
    ),
}


def kind_of(name: str) -> Kind:
    if name != "tpo":
        return KINDS[name]
    tpo = pytest.importorskip("trl.experimental.tpo")
    return Kind(
        tpo.TPOTrainer, tpo.TPOConfig, [{**row, "reference": row["chosen"]} for row in PREFERENCES]
    )


def made(
    name: str,
    model: Any,
    output: Path,
    streamed: StreamedArguments | None = None,
    *,
    stock: bool = False,
    **options: Any,
) -> Any:
    """A trainer, with a constant rate of 1e-3 where no other one is asked for."""
    kind = kind_of(name)
    given = {key: options.pop(key) for key in ("callbacks", "compute_metrics") if key in options}
    rows = kind.rows if kind.rows is ROWS else datasets.Dataset.from_list(kind.rows)
    held_out = ROWS[:5] if kind.rows is ROWS else rows.select(range(5))
    args = kind.config(**trainer_options(output, **{**CONSTANT, **options}))
    own = {} if stock else {"streamed": streamed}
    return (kind.stock if stock else mixed(kind.stock))(
        model=model, args=args, train_dataset=rows, eval_dataset=held_out, **own, **given
    )


BATCHES = [
    {key: torch.stack([row[key] for row in ROWS[start : start + 2]]) for key in ROWS[0]}
    for start in range(0, 12, 2)
]


LRS = [0.0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4]
FALLING: dict[str, Any] = {
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
}  # a warm-up of two steps to 1e-3, then linear to 0 at step 6


def plain_loop(
    base: Path, batches: Iterable[Any] = BATCHES, precision: str = "exact", lrs: Any = None
) -> Engine:
    """What the trainer is held against: the same steps without it."""
    lr: Any = 1e-3 if lrs is None else lrs.__getitem__
    estimator = Guarded(estimator=MeZOSGD(lr=lr, zo_eps=1e-3, perturb_in_place=False))
    model = open_checkpoint(base, precision=precision)
    engine = Engine(
        model, ZerothOrder(estimator, noise=PhiloxNoise(Distribution.RADEMACHER), seed=42)
    )
    for batch in batches:
        engine.step(batch)
    return engine


def weights_of(directory: Path | str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    return state


@pytest.mark.parametrize("name", ["plain", "sft"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_trajectory_is_that_of_a_plain_loop(
    base: Path, tmp_path: Path, name: str, bf16: bool
) -> None:
    """Also where clipping is turned off, which is not refused, and where it is evaluated in
    between.
    """
    evaluated: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3}
    trainer = made(
        name, str(base), tmp_path / "run", bf16=bf16, max_grad_norm=0.0, **FALLING, **evaluated
    )
    output = trainer.train()
    batches = [{key: batch[key] for key in BATCHES[0]} for batch in trainer.get_train_dataloader()]
    updates = trainer.engine.journal.updates
    with plain_loop(base, batches, "mixed" if bf16 else "exact", LRS) as engine:
        assert trainer.block_model.autocast is (torch.bfloat16 if bf16 else None)
        assert updates == engine.journal.updates
        trainer.save_model()
        engine.export(tmp_path / "plain")
    assert_same_weights(
        weights_of(tmp_path / "run").items(), weights_of(tmp_path / "plain").items()
    )
    AutoTokenizer.from_pretrained(tmp_path / "run")
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["learning_rate"] for row in logged] == pytest.approx(LRS)
    assert [row["loss"] for row in logged] == pytest.approx(
        [update.losses[0] for update in updates]
    )
    assert [row["grad_norm"] for row in logged] == pytest.approx(
        [abs(update.projected_grads[0]) for update in updates]
    )
    assert output.global_step == 6
    parameters = sum(
        spec.numel for layout in trainer.block_model.layouts for spec in layout.parameters
    )
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    assert trainer.state.total_flos == 2 * 2 * parameters * tokens


OPTIONS: list[dict[str, Any]] = [
    {"rank": 2, "period": 4, "stack": 1},
    {"queries": 2, "per_row": True, "clip_grad": 0.5},
    {"estimator": "fzoo", "queries": 2, "clip_median": 2.0, "guard": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_the_tree_are_those_of_a_run(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = made("plain", base, tmp_path / "run", ZOArguments(**options), max_steps=3)
    trainer.train()
    names = {"estimator": EstimatorName.FZOO} if "estimator" in options else {}
    asked = Optimization(method="zeroth-order", lr=1e-3, **{**options, **names})
    method = ZerothOrder(
        asked.scheduled_estimator(3, 2),
        noise=asked.generator(),
        perturbation=asked.perturbation,
        seed=42,
    )
    with Engine(open_checkpoint(base), method) as engine:
        for batch in BATCHES[:3]:
            engine.step(batch)
        assert trainer.engine.journal.updates == engine.journal.updates


@pytest.mark.parametrize(
    "given",
    [{"max_grad_value": 1.0}, {"loss_scaling": True}],
    ids=str,
)
def test_options_of_all_parameters_are_refused_beside_an_adapter(given: dict[str, Any]) -> None:
    arguments = StreamedArguments(method="adamw", **given)
    kinds = framework_arguments.Kind
    assert framework_arguments.kind_of(arguments, has_adapter=False) is kinds.FULL
    [name] = given
    with pytest.raises(OptionError, match=f"{name}: found .* --method adamw and an adapter"):
        framework_arguments.kind_of(arguments, has_adapter=True)


@pytest.mark.parametrize(
    "given",
    [
        {"trainer_loss": True},
        {"export_checkpoints": False},
        {"write_back": WriteBackPolicy(directory="scratch")},
    ],
    ids=str,
)
def test_arguments_of_zeroth_order_steps_are_refused_beside_gradients(
    given: dict[str, Any],
) -> None:
    StreamedArguments(method="mezo", **given)
    [name] = given
    with pytest.raises(OptionError, match=f"{name}: found .* --method lora"):
        StreamedArguments(method="lora", **given)


@pytest.mark.parametrize("arguments", [StreamedArguments, LightningArguments])
def test_arguments_are_declared_in_the_tree(arguments: type[Any]) -> None:
    tree = {one.name: one for one in declared(Train)}
    own = {one.name: one for one in declared(arguments)}
    of_frameworks = own.keys() - tree.keys()
    assert of_frameworks <= {"write_back", "trainer_loss", "export_checkpoints"}
    for name in own.keys() - of_frameworks:
        for same in ("type", "default", "marks"):
            assert str(getattr(own[name], same)) == str(getattr(tree[name], same))
        [declaring] = [
            kind for kind in arguments.__mro__ if name in vars(kind).get("__annotations__", ())
        ]
        assert declaring in Train.__mro__ or any(
            declaring in group.owner.__mro__ for group in tree.values()
        ), "no second declaration"
    signature = inspect.signature(arguments).parameters
    assert signature["queries"].annotation is int
    assert signature["noise"].default is Noise.RADEMACHER
    assert "\n    queries: Directions per step." in str(inspect.getdoc(arguments))


def test_a_command_line_of_transformers_has_the_arguments(capsys: Any) -> None:
    words = "--method zeroth-order --noise gaussian --queries 4 --clip_grad 2 --memory 4GiB"
    parser: Any = HfArgumentParser
    [given] = parser(StreamedArguments).parse_args_into_dataclasses(words.split())
    assert given == ZOArguments(noise=Noise.GAUSSIAN, queries=4, clip_grad=2.0, memory="4GiB")
    with pytest.raises(SystemExit):
        parser(StreamedArguments).parse_args_into_dataclasses(["--help"])
    assert "Directions per step." in capsys.readouterr().out


@pytest.mark.parametrize("method", ["sgd", "badam"])
def test_a_method_names_the_optimizer_of_all_parameters(
    base: Path, tmp_path: Path, method: Any
) -> None:
    given = StreamedArguments(method=method)
    args = plain_args(tmp_path, **{**CONSTANT, "max_steps": 2, "max_grad_norm": 0.0})
    trainer = mixed(Trainer)(base, args, streamed=given, train_dataset=ROWS)
    trainer.train()
    assert args.optim != "sgd", "the caller's stay as they are"
    update = make_block_update(method, weight_decay=0.0, seed=42)
    with Engine(open_checkpoint(base), FirstOrder(update, lr=1e-3)) as engine:
        for batch in BATCHES[:2]:
            engine.step(batch)
        assert_same_weights(trainer.engine.parameters_now(), dict(engine.parameters_now()).items())


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(
        tmp_path_factory.mktemp("reward") / "base", labels=1, vocab_size=VOCABULARY
    )


OWN_LOSSES = short_first(
    [
        ("smoothed", {"bf16": True}),
        ("sft", {"loss_type": "dft"}),
        ("dpo", {}),
        ("reward", {"bf16": True}),
        ("tpo", {}),
    ],
    [
        *(("smoothed", {}), ("sft", {}), ("sft", {"bf16": True}), ("reward", {})),
        *(
            ("dpo", {"loss_type": "ipo"}),
            ("dpo", {"loss_type": ["sigmoid", "sft"]}),
            ("dpo", {"bf16": True}),
        ),
        ("reward", {"center_rewards_coefficient": 0.1}),
    ],
)


@pytest.mark.parametrize("case", OWN_LOSSES, ids=str)
def test_a_loss_of_its_own_is_monolithic_mezos(
    base: Path,
    rewarded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, dict[str, Any]],
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    name, changes = case
    base, kind = rewarded if name == "reward" else base, kind_of(name)
    trainer = made(
        name,
        base,
        tmp_path / "run",
        replace(EXACT, trainer_loss=name == "sft"),
        **{**changes, "logging_steps": 6},
    )
    trainer.train()
    [logged] = [row for row in trainer.state.log_history if "loss" in row]
    assert kind.logged <= logged.keys()
    whole = kind.auto_class.from_pretrained(base)
    extra: dict[str, Any] = {"precompute_ref_log_probs": True} if name == "dpo" else {}
    stock = made(name, whole, tmp_path / "stock", stock=True, **extra, **changes)
    for column in ("ref_chosen_logps", "ref_rejected_logps") if name == "dpo" else ():
        assert trainer.train_dataset[column] == stock.train_dataset[column], column

    class Literal(MonolithicMeZO):
        def loss(self, batch: Any) -> torch.Tensor:
            with torch.inference_mode():
                return stock.compute_loss(stock.model_wrapped, dict(batch)).detach()  # type: ignore[no-any-return]

    with torch.inference_mode():
        stock.model_wrapped = stock.accelerator.prepare_model(whole)
        literal, batches = Literal(whole, lr=1e-3, zo_eps=1e-2), iter(stock.get_train_dataloader())
        for update in trainer.engine.journal.updates:
            assert literal.step(next(batches), update.seeds[0]).losses == update.losses
    assert_same_weights(trainer.engine.parameters_now(), whole.named_parameters())
    trainer.save_model(tmp_path / "saved")
    kind.auto_class.from_pretrained(tmp_path / "saved")


def summed(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """A loss function that is no mean over labelled tokens."""
    targets = labels[:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")


def replaces_compute_loss(trainer: Any) -> None:
    own = trainer.compute_loss
    trainer.compute_loss = lambda *arguments, **named: 2 * own(*arguments, **named)


def replaces_forward(trainer: Any) -> None:
    model, own = trainer.model, trainer.model.forward

    @wraps(own)  # from whose signature trainers read which columns it takes
    def squared(*arguments: Any, **named: Any) -> Any:
        output = own(*arguments, **named)
        output.loss = None if output.loss is None else output.loss.square()
        return output

    model.forward = squared


def asks_for_routers(trainer: Any) -> None:
    trainer.model.config.output_router_logits = True


AFTERWARDS: dict[str, Callable[[Any], None]] = {
    "nothing": lambda trainer: None,
    "compute_loss": replaces_compute_loss,
    "compute_loss_func": lambda trainer: setattr(
        trainer, "compute_loss_func", lambda output, labels, **_: summed(output.logits, labels)
    ),
    "label_smoother": lambda trainer: setattr(trainer, "label_smoother", LabelSmoother(0.3)),
    "loss_function": lambda trainer: setattr(trainer.model, "loss_function", summed),
    "forward": replaces_forward,
    "averaging": lambda trainer: setattr(trainer, "model_accepts_loss_kwargs", False),
    "routers": asks_for_routers,
    "loss_type": lambda trainer: setattr(trainer.args, "loss_type", "dft"),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose config asks for the loss of routers or does not, which trainers decide."""
    directory = tmp_path_factory.mktemp("mixture") / "base"
    config: Any = families.small_config("qwen3_moe")
    config.output_router_logits, config.router_aux_loss_coef = False, 0.5
    families.small_model(config).save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.mark.parametrize(
    ("name", "afterwards"),
    [
        *(("plain", name) for name in AFTERWARDS if name != "loss_type"),
        ("sft", "loss_type"),
        ("sft", "routers"),
    ],
)
def test_a_trainers_loss_is_that_of_its_present_settings(
    name: str, afterwards: str, mixture: Path, tmp_path: Path
) -> None:
    """Also if it was the model's own when the trainer was made. Rows have unequal lengths."""
    rows = [
        {key: value[: 3 + number] for key, value in row.items()}
        for number, row in enumerate(ROWS[:2])
    ]
    changes = dict[str, Any](gradient_accumulation_steps=2, per_device_train_batch_size=1)
    changes |= {"max_steps": 1} | ({"router_aux_loss_coef": 0.0} if name == "sft" else {})
    logged = []
    for is_stock in (False, True):
        model: Any = AutoModelForCausalLM.from_pretrained(mixture) if is_stock else mixture
        unmoved = replace(EXACT, zo_eps=1e-12)
        trainer = made(name, model, tmp_path / "run", unmoved, stock=is_stock, **changes)
        if name == "plain":
            trainer.train_dataset = rows
        AFTERWARDS[afterwards](trainer)
        trainer.train()
        logged.append(trainer.state.log_history[0]["loss"])
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)


@pytest.mark.parametrize("coefficient", [None, 0.0, 0.1])
def test_sft_has_the_loss_of_routers_with_the_trainers_coefficient(
    coefficient: float | None, mixture: Path, tmp_path: Path
) -> None:
    """Whatever config.json asks for."""
    asking = tmp_path / "asking"
    shutil.copytree(mixture, asking)
    config = json.loads((asking / "config.json").read_text())
    (asking / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))
    logged = []
    for base, is_stock in ((mixture, True), (mixture, False), (asking, False)):
        model: Any = AutoModelForCausalLM.from_pretrained(base) if is_stock else base
        unmoved = replace(EXACT, zo_eps=1e-12)
        options = {"max_steps": 1, "router_aux_loss_coef": coefficient}
        trainer = made("sft", model, tmp_path / "run", unmoved, stock=is_stock, **options)
        trainer.train()
        logged.append(trainer.state.log_history[0]["loss"])
    assert logged[1:] == pytest.approx(2 * [logged[0]], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "weights"), [("plain", True), ("plain", False), ("sft", True), ("dpo", True)]
)
def test_a_resumed_run_is_the_one_that_was_not_interrupted(
    base: Path, tmp_path: Path, name: str, weights: bool
) -> None:
    zo = ZOArguments(export_checkpoints=weights)
    saved: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "linear",
    }
    whole = made(name, base, tmp_path / "run", zo, save_total_limit=2, **saved)
    whole.train()
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-4", "checkpoint-6"]
    assert (tmp_path / "run" / "checkpoint-4" / "model.safetensors").exists() == weights
    resumed = made(name, base, tmp_path / "run", zo, **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert resumed.engine.journal.updates == whole.engine.journal.updates
    last = made(name, base, tmp_path / "run", zo, lr_scheduler_type="linear")
    last.train(resume_from_checkpoint=True)
    assert last.engine.version == last.state.global_step == 6


def test_gradient_accumulation_is_one_step_of_several_batches_whose_losses_are_averaged(
    base: Path, tmp_path: Path
) -> None:
    trainer = made(
        "plain", base, tmp_path, gradient_accumulation_steps=4, max_steps=-1, num_train_epochs=2
    )
    trainer.train()
    with plain_loop(base, [BATCHES[:4], BATCHES[4:]] * 2) as engine:
        assert trainer.engine.journal.updates == engine.journal.updates
    trainer = made("smoothed", base, tmp_path, gradient_accumulation_steps=2, max_steps=2)
    trainer.loss_is_scaled_for_ga = False
    losses: list[torch.Tensor] = []
    compute = trainer.compute_loss

    def noting(*arguments: Any, **options: Any) -> Any:
        losses.append(compute(*arguments, **options))
        return losses[-1]

    trainer.compute_loss = noting
    trainer.train()
    update = trainer.engine.journal.updates[0]
    pieces = [float(loss) for loss in losses[:4]]  # two batches at +eps, then two at -eps
    assert update.losses == pytest.approx([sum(pieces[:2]) / 2, sum(pieces[2:]) / 2])


def test_evaluation_is_the_stock_trainers(base: Path, tmp_path: Path) -> None:
    def metrics(prediction: Any) -> dict[str, float]:
        right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": float(right.mean()), "spread": float(np.std(prediction.predictions))}

    options: dict[str, Any] = {"compute_metrics": metrics}
    trainer = made("plain", base, tmp_path / "run", **options)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    stock = made("plain", whole, tmp_path / "stock", stock=True, **options)
    ours, theirs = trainer.evaluate(), stock.evaluate()
    for key in ("eval_loss", "eval_accuracy", "eval_spread"):
        assert ours[key] == theirs[key], key
    rows: Any = ROWS[5:8]
    predicted: Any = [one.predict(rows).predictions for one in (trainer, stock)]
    assert np.array_equal(predicted[0], predicted[1])
    loss, logits, labels = trainer.prediction_step(
        trainer.model, BATCHES[0], prediction_loss_only=False
    )
    assert torch.equal(logits, whole(**BATCHES[0]).logits)
    assert torch.equal(labels, BATCHES[0]["labels"])
    assert loss == trainer.engine.evaluate([BATCHES[0]]).loss


def test_the_best_model_is_kept_and_training_stops_early(base: Path, tmp_path: Path) -> None:
    class Worse(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            metrics = given["metrics"]
            metrics["eval_loss"] += state.global_step  # the first evaluation is the best one
            calls.append(state.global_step)

    calls: list[int] = []
    trainer = made(
        "plain",
        base,
        tmp_path / "run",
        callbacks=[Worse(), EarlyStoppingCallback(early_stopping_patience=2)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        streamed=ZOArguments(export_checkpoints=False),
    )
    trainer.train()
    assert calls == [1, 2, 3]
    assert trainer.state.best_global_step == 1
    assert trainer.engine.version == 1
    trainer.save_model(tmp_path / "best")
    with plain_loop(base, BATCHES[:1]) as engine:
        engine.export(tmp_path / "plain")
    assert_same_weights(
        weights_of(tmp_path / "best").items(), weights_of(tmp_path / "plain").items()
    )


def without_data(model: Any, **options: Any) -> Any:
    return mixed(Trainer)(model=model, train_dataset=ROWS, **options)


def of_trl(trainer: str, *, derived: bool = False) -> Callable[[Path, Path], object]:
    def make(base: Path, output: Path) -> object:
        kind = mixed(getattr(trl, trainer))
        kind = type("Derived", (kind,), {}) if derived else kind
        return kind(model=base, args=plain_args(output))

    return make


def untried(base: Path, output: Path) -> object:
    new: Any = type("NewTrainer", (trl.SFTTrainer,), {"__module__": "trl.experimental.new"})
    return mixed(new)(model=base, args=plain_args(output))


def generating(base: Path, output: Path) -> object:
    args = Seq2SeqTrainingArguments(
        output_dir=str(output), use_cpu=True, report_to=[], predict_with_generate=True
    )
    return mixed(Seq2SeqTrainer)(model=base, args=args, train_dataset=ROWS)


def plain_args(output: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**trainer_options(output, **changes))


def full(base: Path, output: Path, method: Any = "adamw", **changes: Any) -> Any:
    given = StreamedArguments(method=method)
    return mixed(Trainer)(base, plain_args(output, **changes), streamed=given)


UNTRAINABLE = {
    "GRPOTrainer": "generates text during training",
    "RLOOTrainer": "generates text during training",
    "DistillationTrainer": "generates text during training",
    "KTOTrainer": "calls the model with a second batch within one loss",
}
SGD: Any = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
REFUSED: list[tuple[Callable[[Path, Path], object], str]] = [
    *(
        (lambda base, run, changes=changes: made("plain", base, run, **changes), said)
        for said, changes in (
            ("optim: found", {"optim": "sgd"}),
            ("adam_beta1: found 0.0", {"adam_beta1": 0.0}),
            (
                "max_grad_norm: found 0.3; expected the default, 1.0.*no gradient whose norm "
                "could be clipped",
                {"max_grad_norm": 0.3},
            ),
            ("neftune_noise_alpha: found 5", {"neftune_noise_alpha": 5}),
            ("auto_find_batch_size: found True", {"auto_find_batch_size": True}),
            ("bf16_full_eval: found True", {"bf16_full_eval": True}),
        )
    ),
    *(
        (
            lambda *_, wrong=wrong: ZOArguments(**wrong),
            said,
        )
        for wrong, said in (
            ({"estimator": None}, "estimator: found None; expected one of es, fzoo, mezo"),
            ({"noise": "white"}, "noise: found 'white'; expected one of gaussian, mezo, rade"),
            ({"method": "adam"}, "method: found 'adam'; expected one of adalomo"),
            ({"queries": 0}, "queries: found 0"),
            ({"memory": "much"}, "memory: found"),
            ({"switch_every": 3}, "switch_every: found 3 with --method zeroth-order"),
            ({"method": "adamw", "queries": 2}, "queries: found 2 with --method adamw"),
            ({"per_row": True}, "queries: found 1 with per_row; expected at least 2"),
        )
    ),
    (generating, "predict_with_generate: found True"),
    (lambda base, _: without_data(base, args={}), "args: found a dict"),
    (
        lambda base, run: without_data(base, args=plain_args(run), model_init=lambda: None),
        "model_init: found",
    ),
    (
        lambda base, run: without_data(base, args=plain_args(run), optimizers=(SGD, None)),
        "optimizers: found",
    ),
    (
        lambda base, run: without_data(base, args=plain_args(run), peft_config=object()),
        r"peft_config: found .*open_checkpoint\(model, adapter=Adapter\(config=peft_config\)\)",
    ),
    (
        lambda base, run: made("plain", AutoModelForCausalLM.from_pretrained(base), run),
        "model: found a LlamaForCausalLM",
    ),
    *(
        (
            lambda base, run, name=name: made(name, open_checkpoint(base), run, bf16=True),
            "bf16, fp16: found a model that",
        )
        for name in ("plain", "sft")
    ),
    (
        lambda base, run: (
            made("plain", base, run).rewind(Journal()) or full(base, run).rewind(Journal())
        ),
        "rewind: found a run of adamw; expected a run of zeroth-order steps",
    ),
    (
        lambda base, run: full(base, run, method="lora+lomo"),
        "base_lr: found nothing; expected a learning rate of the base",
    ),
    (
        lambda base, run: full(base, run, method="lomo", optim="sgd"),
        "optim: found .*sgd.*lomo is the optimizer",
    ),
    (
        lambda base, run: made("smoothed", base, run, ZOArguments(micro_batch_size=1)).train(),
        "micro_batch_size: found 1, with a loss that the trainer computes",
    ),
    (
        lambda base, run: made(
            "sft", open_checkpoint(base), run, model_init_kwargs={"dtype": "float32"}
        ),
        "model_init_kwargs: found",
    ),
    (
        lambda base, run: made("dpo", base, run, disable_dropout=False),
        "disable_dropout: found False; expected the default",
    ),
    (lambda base, run: made("dpo", base, run, sync_ref_model=True), "sync_ref_model: found True"),
    (
        lambda base, run: mixed(trl.DPOTrainer)(
            model=base, args=plain_args(run), ref_model="other"
        ),
        "ref_model: found a str",
    ),
    *(
        (of_trl(name, derived=derived), f"{name}: found a trainer that {why}")
        for name, why in UNTRAINABLE.items()
        for derived in (False, True)
    ),
    (untried, "NewTrainer: found a trainer that has not been tested"),
    (
        lambda base, run: made("reward", open_checkpoint(base), run),
        "model: found a LlamaForCausalLM with num_labels=2; expected a reward model",
    ),
]


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_be_heeded_is_refused(
    base: Path, tmp_path: Path, make: Callable[[Path, Path], object], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        make(base, tmp_path / "run")


def test_what_is_absent_or_no_reward_model_is_refused_and_all_of_trls_trainers_are_known(
    base: Path, tmp_path: Path
) -> None:
    exported = {name for name in dir(trl) if name.endswith("Trainer")}
    assert exported == {*UNTRAINABLE, "SFTTrainer", "DPOTrainer", "RewardTrainer"}
    with pytest.raises(JournalError, match=r"journal.jsonl: found no file"):
        made("plain", base, tmp_path / "run").train(resume_from_checkpoint=str(base))
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight.*AutoModelForSequenceClassification.*num_labels=1"
    ):
        made("reward", base, tmp_path / "run")


def test_a_function_that_cannot_run_in_segments_is_refused(base: Path) -> None:
    model = open_checkpoint(base)
    batch, other = BATCHES[0], BATCHES[1]

    def twice(called: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return called(**inputs).loss + called(**other).loss  # type: ignore[no-any-return]

    def again(called: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = called(inputs["input_ids"], labels=inputs["labels"]).loss
        logits: torch.Tensor = called(inputs["input_ids"]).logits
        return loss + logits.mean()

    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine:
        with pytest.raises(
            BatchError, match=r"batch\['input_ids'\]: found different values in a second call"
        ):
            engine.step(batch, CalledForward(model, twice))
        with pytest.raises(UnsupportedModelError, match="returned without calling it"):
            engine.step(batch, CalledForward(model, lambda called, inputs: torch.zeros(())))
        with pytest.raises(
            UnsupportedModelError, match="argument output_hidden_states: found True"
        ):
            engine.step(
                batch,
                CalledForward(model, lambda called, i: called(**i, output_hidden_states=True).loss),
            )
        model.config.output_hidden_states = True
        with pytest.raises(UnsupportedModelError, match="output_hidden_states of the config"):
            engine.step(batch, CalledForward(model, again))
        model.config.output_hidden_states = False
        assert engine.version == 0
        engine.step(batch, CalledForward(model, again))


@pytest.mark.parametrize("kind", ["drop_last", "iterable"])
def test_incomplete_batches_count_as_in_the_stock_trainer(
    base: Path, tmp_path: Path, kind: str
) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(ROWS[:5])

    options: dict[str, Any] = {"dataloader_drop_last": kind == "drop_last"}
    rows: Any = Stream() if kind == "iterable" else ROWS[:5]
    trainer = made("plain", base, tmp_path / "run", **options)
    stock = made(
        "plain",
        AutoModelForCausalLM.from_pretrained(base),
        tmp_path / "stock",
        stock=True,
        **options,
    )
    ours: Any = trainer.predict(rows)
    theirs: Any = stock.predict(rows)
    assert np.array_equal(ours.predictions, theirs.predictions)
    assert ours.metrics["test_loss"] == theirs.metrics["test_loss"]


def test_weights_that_were_written_back_are_in_nobodys_way(base: Path, tmp_path: Path) -> None:
    zo = ZOArguments(write_back=WriteBackPolicy(directory=tmp_path / "disk", every=1))
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    trainer = made("plain", base, tmp_path / "run", zo, load_best_model_at_end=True, **options)
    trainer.train()
    best = trainer.state.best_global_step
    assert trainer.engine.version == best
    resumed = made("plain", base, tmp_path / "run", zo)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    with plain_loop(base) as engine:
        assert resumed.engine.journal.updates == engine.journal.updates


def test_what_the_trainer_tells_the_config_is_saved_and_saving_again_replaces_it(
    base: Path, tmp_path: Path
) -> None:
    trainer = made("plain", base, tmp_path / "run")
    stale = tmp_path / "run" / "model-00001-of-00002.safetensors"
    stale.write_bytes(b"of another model")
    trainer.save_model()
    trainer.train()
    trainer.save_model()
    assert not stale.exists()
    assert len((tmp_path / "run" / "journal.jsonl").read_text().splitlines()) >= 7
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="file: found"):
        trainer._save(str(tmp_path / "file"))
    trainer = made("plain", base, tmp_path / "again")
    trainer.model.config.pad_token_id, trainer.model.generation_config.eos_token_id = 7, [4, 2]
    trainer.model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.config.pad_token_id == 7
    assert saved.generation_config.eos_token_id == [4, 2]
    with pytest.raises(OptionError, match=r"model.push_to_hub"):
        trainer.model.push_to_hub("somewhere")
    with pytest.raises(UnsupportedModelError, match="a call outside of a sweep"):
        trainer.model(**BATCHES[0])
    trainer._method.exports_checkpoints = False
    trainer._write(tmp_path / "saved", is_checkpoint=True)
    assert not (tmp_path / "saved" / "model.safetensors").exists(), (
        "of another version than the journal"
    )


def test_a_step_that_was_broken_off_is_forgotten(base: Path, tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True

    trainer = made("plain", base, tmp_path, gradient_accumulation_steps=2, callbacks=[Stop()])
    trainer.train()
    assert trainer.engine.version == 0
    trainer.pop_callback(Stop)
    trainer.train()
    with plain_loop(base, [BATCHES[:2]]) as engine:
        assert trainer.engine.journal.updates[0] == engine.journal.updates[0]


def test_memory_is_counted_with_the_logits(base: Path) -> None:
    model = open_checkpoint(base, precision="mixed", dtype="bfloat16", loss_chunk=1)
    seen, kept = (
        CalledForward(model, lambda called, batch: called(**batch).loss),
        BATCHES[0]["input_ids"].numel(),
    )
    keeping = CalledForward(model, lambda called, batch: called(**batch).logits, keeps_logits=True)
    batch = seen.prepared(BATCHES[0])
    whole = open_checkpoint(base)
    assert seen.forward_bytes(batch) >= whole.forward_bytes(whole.prepared(BATCHES[0]))
    assert (
        keeping.held_bytes(keeping.prepared(BATCHES[0]))
        == seen.held_bytes(batch) + kept * VOCABULARY * 4
    )


def test_sft_accumulates_as_the_stock_trainer_does_and_packed_rows_run_without_padding(
    base: Path, tmp_path: Path
) -> None:
    """A step of several batches is the mean over all their labelled tokens, with the trainer's loss
    and with the model's.
    """
    losses = []
    for name, own in (("own", True), ("models", False)):
        zo = ZOArguments(trainer_loss=own)
        trainer = made(
            "sft", base, tmp_path / name, streamed=zo, gradient_accumulation_steps=3, max_steps=2
        )
        trainer.train()
        losses.append([update.losses for update in trainer.engine.journal.updates])
    assert [list(theirs) for theirs in losses[0]] == [
        pytest.approx(ours, rel=1e-5) for ours in losses[1]
    ]
    trainer = made(
        "sft", base, tmp_path / "run", streamed=EXACT, packing=True, max_length=12, max_steps=2
    )
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    assert "position_ids" in batch
    assert "attention_mask" not in batch
    whole = AutoModelForCausalLM.from_pretrained(base)
    literal = MonolithicMeZO(whole, lr=1e-3, zo_eps=1e-2)
    kept = {key: batch[key] for key in ("input_ids", "position_ids", "labels")}
    [first, *_] = trainer.engine.journal.updates
    whole.config.use_cache = False
    assert literal.step(kept, first.seeds[0]).losses == first.losses


def test_evaluation_of_trls_trainers_is_the_stock_ones(base: Path, tmp_path: Path) -> None:
    for name in ("sft", "dpo"):
        trainer = made(name, base, tmp_path / name)
        trainer.train()
        trainer.save_model(tmp_path / name / "saved")
        ours = trainer.evaluate()
        fresh = made(name, str(tmp_path / name / "saved"), tmp_path / name / "fresh")
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / name / "saved")
        extra: dict[str, Any] = {"precompute_ref_log_probs": True} if name == "dpo" else {}
        theirs = made(name, whole, tmp_path / name / "stock", stock=True, **extra).evaluate()
        of_fresh = fresh.evaluate()
        for key in theirs.keys() - {
            "eval_runtime",
            "eval_samples_per_second",
            "eval_steps_per_second",
        }:
            if not key.endswith(("_time", "num_tokens")):
                assert of_fresh[key] == theirs[key], (name, key)
        if name == "sft":
            assert ours["eval_loss"] == theirs["eval_loss"]


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zo2_train_and_sft_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model", small_config("llama"), dtype)
    save_tokenizer(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", PAIRS)
    options_of_both = ["--steps", "6", "--lr", "1e-3", "--batch-size", "4", "--seed", "5"]
    if dtype is torch.bfloat16:
        options_of_both += ["--dtype", "bfloat16"]  # of the two that mixed precision may take
    done(
        "train",
        "--method",
        "zeroth-order",
        "--model",
        "model",
        "--data",
        "rows.jsonl",
        "--output",
        "run",
        *options_of_both,
    )
    data = RowReader(AutoTokenizer.from_pretrained("model"), LONGEST).read(Path("rows.jsonl"))
    in_order = [
        row
        for batch, _ in zip(training_batches(data, batch_size=4, seed=5), range(6), strict=False)
        for row in batch
    ]
    rows = datasets.Dataset.from_list(
        [
            {
                "input_ids": list(row.input_ids),
                "labels": [-100] * row.prompt_length + list(row.input_ids[row.prompt_length :]),
            }
            for row in in_order
        ]
    )
    changes = {"bf16": dtype is torch.bfloat16, "per_device_train_batch_size": 4, "seed": 5}
    kept = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    args = trl.SFTConfig(**trainer_options(tmp_path / "sft", **CONSTANT, **changes, **kept))
    trainer = mixed(trl.SFTTrainer)(model="model", args=args, train_dataset=rows)
    trainer.train()
    assert trainer.engine.journal.updates == Journal("run/journal.jsonl").updates
    trainer.save_model("saved")
    assert_same_weights(weights_of("run/model").items(), weights_of("saved").items())


def test_dpos_reference_stays_the_base(base: Path, tmp_path: Path) -> None:
    """Rows that are evaluated later are compared with the base, whatever steps were taken."""
    trainer = made("dpo", base, tmp_path / "run")
    batch = next(iter(trainer.get_train_dataloader()))
    of_base = trainer.compute_ref_log_probs(trainer.model, batch)
    trainer.train()
    version = trainer.engine.version
    later = trainer.compute_ref_log_probs(trainer.model, batch)
    assert all(torch.equal(one, other) for one, other in zip(of_base, later, strict=True))
    assert trainer.engine.version == version == 6


# Checkpoints: damaged copies are refused, and a kill while saving leaves a whole model


def saving(base: Path, output: Path, **options: Any) -> Any:
    told = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "linear",
    }
    return made("plain", base, output, ZOArguments(export_checkpoints=False), **{**told, **options})


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with checkpoints at steps 2 and 4."""
    directory: Path = tmp_path_factory.mktemp("checkpoints") / "run"
    saving(base, directory).train()
    return directory


def without_last_line(text: str) -> str:
    return "".join(text.splitlines(keepends=True)[:-1])


DAMAGES: dict[str, tuple[Callable[[str], str], str]] = {
    "the last line is cut": (
        lambda text: text[:-9],
        "a last record that is cut or damaged, after 3 steps",
    ),
    "a digit of the last line is another one": (
        lambda text: text[:-30] + str((int(text[-30], 16) + 1) % 10) + text[-29:],
        "a last record that is cut or damaged, after 3 steps",
    ),
    "a whole line is missing": (without_last_line, "found 3 steps; expected 4"),
    "a line in the middle is damaged": (
        lambda text: text.replace('"step":1', '"step":7'),
        "found a damaged record",
    ),
    "nothing is left": (lambda text: "", "an empty file, after 0 steps"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_journal_is_refused(
    base: Path, trained: Path, tmp_path: Path, damage: Callable[[str], str], said: str
) -> None:
    copy = Path(shutil.copytree(trained / "checkpoint-4", tmp_path / "run" / "checkpoint-4"))
    text = (copy / "journal.jsonl").read_text()
    assert damage(text) != text
    (copy / "journal.jsonl").write_text(damage(text))
    trainer = saving(base, tmp_path / "run")
    with pytest.raises(JournalError, match=said):
        trainer.train(resume_from_checkpoint=str(copy))
    trainer.state.best_model_checkpoint = str(copy)
    with pytest.raises(JournalError, match=said):
        trainer._load_best_model()
    assert trainer.engine.version == 0


def test_a_checkpoint_of_a_second_call_of_train_goes_on_from_its_own_step(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    twice = saving(base, tmp_path / "run")
    twice.train()
    twice.train()
    middle = tmp_path / "run" / "checkpoint-2"
    assert json.loads((middle / "trainer_state.json").read_text())["global_step"] == 2
    resumed = saving(base, tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(middle))
    assert resumed.engine.journal.updates == twice.engine.journal.updates
    assert resumed.engine.version == 8
    copy = Path(shutil.copytree(trained / "checkpoint-2", tmp_path / "other" / "checkpoint-2"))
    shutil.copy(trained / "checkpoint-4" / "journal.jsonl", copy)
    with pytest.raises(
        JournalError, match=r"checkpoint-2/journal\.jsonl: found 4 steps; expected 2"
    ):
        saving(base, tmp_path / "other").train(resume_from_checkpoint=str(copy))


def test_a_checkpoint_without_a_version_is_held_against_the_trainers_step(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(trained / "checkpoint-4", tmp_path / "run" / "checkpoint-4"))
    state = json.loads((copy / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["ZOTrainerMixin"]
    (copy / "trainer_state.json").write_text(json.dumps(state))
    trainer = saving(base, tmp_path / "run", max_steps=5)
    trainer.train(resume_from_checkpoint=str(copy))
    assert trainer.engine.version == 5
    (copy / "journal.jsonl").write_text(without_last_line((copy / "journal.jsonl").read_text()))
    with pytest.raises(JournalError, match="found 3 steps; expected 4"):
        saving(base, tmp_path / "run").train(resume_from_checkpoint=str(copy))


class Killed(BaseException):
    """Ends a save where a process is killed."""


@contextmanager
def killed_at(place: int) -> Iterator[None]:
    """Ends what runs at its change number ``place`` of names in a directory.

    A killed process removes nothing.
    """
    left = [place]

    def counted(change: Any) -> Any:
        def changing(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return change(*arguments, **options)

        return changing

    with pytest.MonkeyPatch.context() as patched:
        for method in ("replace", "rename", "unlink"):
            patched.setattr(Path, method, counted(getattr(Path, method)))
        patched.setattr(tempfile.TemporaryDirectory, "__exit__", leave_behind)
        yield


def leave_behind(directory: Any, *_: object) -> None:
    directory._finalizer.detach()


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def contents(directory: Path) -> tuple[set[str], list[bytes]]:
    """Names of files, but for those of shards, and what the weights and the journal are."""
    names = {path.name for path in directory.iterdir() if "model-" not in path.name}
    shards = sorted(directory.glob("model*.safetensors"))
    return names, [path.read_bytes() for path in (*shards, directory / "journal.jsonl")]


def shards_of(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    writing = partial(write_checkpoint, max_shard=nbytes)
    monkeypatch.setattr(zo2core.engine, "write_checkpoint", writing)


WHOLE, CUT = 10**9, 4000  # bytes of a shard


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("before", "after"), [(WHOLE, WHOLE), (CUT, CUT), (WHOLE, CUT), (CUT, WHOLE)]
)
def test_a_kill_while_a_model_is_saved_again_leaves_a_whole_one(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    trainer = saving(
        base, tmp_path / "run", max_steps=1, save_strategy="no", lr_scheduler_type="constant"
    )
    trainer.train()
    shards_of(monkeypatch, before)
    trainer.save_model(tmp_path / "earlier")
    trainer.engine.step({key: value[None] for key, value in ROWS[5].items()})
    shards_of(monkeypatch, after)
    trainer.save_model(tmp_path / "later")
    earlier, later = weights_of(tmp_path / "earlier"), weights_of(tmp_path / "later")
    assert not are_equal(earlier, later)
    seen = set()
    for place in range(100):
        directory = Path(shutil.copytree(tmp_path / "earlier", tmp_path / str(place)))
        with killed_at(place), suppress(Killed):
            trainer.save_model(directory)
            break
        found = weights_of(directory)
        assert are_equal(found, earlier) or are_equal(found, later), place
        opened = dict(Engine(open_checkpoint(directory)).parameters_now())
        assert are_equal(opened, earlier) or are_equal(opened, later), place
        version = len(Journal(directory / "journal.jsonl").updates)
        assert version in (1, 2)
        assert version == 1 or are_equal(found, later), (
            "a journal is never ahead of the model beside it"
        )
        seen.add((are_equal(found, later), version))
        trainer.save_model(directory)
        assert contents(directory) == contents(tmp_path / "later")
    assert {(False, 1), (True, 1)} <= seen


def test_a_kill_while_an_adapter_and_its_base_are_saved_again_never_mixes_two_of_them(
    tmp_path: Path,
) -> None:
    def save(directory: Path, content: str) -> None:
        def write(written: Path) -> None:
            for folder in ("adapter", "base"):
                (written / folder).mkdir(parents=True)
                (written / folder / "weights").write_text(content)

        save_files(directory, write)

    save(tmp_path / "earlier", "earlier")
    for place in range(20):
        directory = Path(shutil.copytree(tmp_path / "earlier", tmp_path / str(place)))
        with killed_at(place), suppress(Killed):
            save(directory, "later")
            break
        left = {path.parent.name: path.read_text() for path in directory.glob("*/weights")}
        assert "adapter" not in left or left["adapter"] == left.get("base"), place
        save(directory, "later")
        assert {path.read_text() for path in directory.glob("*/weights")} == {"later"}
    assert place > 2


def test_a_save_leaves_a_folder_alone_that_is_no_part_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "weights").write_text("of the user")

    def write(written: Path) -> None:
        written.mkdir()
        (written / "model.safetensors").write_text("new")

    save_files(tmp_path, write)
    assert (tmp_path / "adapter" / "weights").read_text() == "of the user"
