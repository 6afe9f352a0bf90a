"""The tree of options: each option of train is declared once, and what a resumed run takes of a
command follows from it.
"""

import json
import math
import shutil
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import ROWS, done, leaves, make_place, refusal, run_here, write_rows

from zo2adapters import train
from zo2adapters.commands.evaluate import Evaluate, WriteRows
from zo2adapters.commands.options import (
    command_of,
    error_line,
    filled_in,
    nearest_name,
    option_fields,
    option_names,
    parse_command,
)
from zo2adapters.commands.train import Train, values_of_recipe
from zo2adapters.tasks.option_tree import Change, Option, declared, flag
from zo2adapters.tasks.option_tree import leaves as leaves_of
from zo2adapters.trainers import checked_json
from zo2adapters.trainers.optimization import Noise, Optimization
from zo2adapters.trainers.option_checks import require_valid
from zo2adapters.trainers.options import RunOptions, TrainOptions
from zo2adapters.trainers.recipe import read_recipe, recipe_text, require_unchanged
from zo2core import Journal
from zo2core.errors import OptionError
from zo2core.ranges import EstimatorName, Fitness

OPTIONS: dict[str, Option] = {
    one.name: one.option for one in declared(Train) if one.option is not None
}
OF_RUNS: dict[str, Option] = {
    one.name: one.option for one in declared(RunOptions) if one.option is not None
}
EXCLUDED = [
    (name, other, expected)
    for name, option in OPTIONS.items()
    for other, expected in option.excludes.items()
]
NEEDED = [
    (name, list(option.needs))
    for name, option in OF_RUNS.items()
    if option.needs and "estimator=mezo" not in option.needs  # the default
]
CHANGED: dict[str, tuple[object, object]] = {  # the value on the command line, and in the options
    "steps": (5, 5),
    "keep_best": (True, True),
    "report_to": ("tensorboard", "tensorboard"),
    "memory": ("6GiB", "6GiB"),
    "device_memory": ("6GiB", "6GiB"),
    "snapshot_every": (3, 3),
    "activation_memory": ("1GiB", "1GiB"),
    "reward_seconds": (7, 7.0),
    "reward_memory": ("2GiB", "2GiB"),
    "max_drift": (0.5, 0.5),
    "write_back_every": (4, 4),
    "write_limit_tb": (0.5, 0.5),
}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainOptions:
    """Options of a run that begins, in the directory ``run``."""
    monkeypatch.chdir(tmp_path)
    given = (
        "--model base --data rows.jsonl --evaluation rows.jsonl --output run --steps 4 "
        "--method zeroth-order --reward length"
    )
    command: Train = parse_command(
        "train", Train, [*given.split(), "--estimator", "es", "--queries", "2"]
    )
    options = command.options.settled_as(command.options)
    Path("run").mkdir()
    text = checked_json.to_text({"options": options.to_json()})
    (Path("run") / "options.json").write_text(text)
    return options


def test_every_option_has_a_row_and_every_row_an_option_also_of_a_saved_run(
    saved: TrainOptions,
) -> None:
    listed = option_fields(Train)
    assert sorted(OPTIONS) == sorted(option.field for option in listed)
    of_the_command = {name for name, row in OPTIONS.items() if row.change is Change.CALL}
    assert {*leaves(saved.to_json())} - {"schedule_steps"} == OPTIONS.keys() - of_the_command


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "name", [name for name, row in OPTIONS.items() if row.change is Change.RESUME]
)
def test_what_may_change_at_a_resume_changes(name: str, saved: TrainOptions) -> None:
    given, expected = CHANGED[name]
    written = [flag(name), *([] if given is True else [str(given)])]
    command: Train = parse_command("train", Train, ["--resume", "run", *written])
    before, after = leaves(saved.to_json()), leaves(command.options.to_json())
    assert {name: after[name] for name in after if after[name] != before[name]} == {
        name: expected,
        **({"schedule_steps": 4} if name == "steps" else {}),
    }


@pytest.mark.parametrize(
    "change",
    [change for change in Change if change not in (Change.RESUME, Change.CALL)],
    ids=lambda change: change.name,
)
def test_what_is_fixed_at_the_start_is_refused_by_name(change: Change, saved: TrainOptions) -> None:
    before = leaves(saved.to_json())
    for name in (name for name, row in OPTIONS.items() if row.change is change):
        with pytest.raises(OptionError, match=f"^{name}: found "):
            require_unchanged(before, {**before, name: ["another value"]}, Change.RESUME, remedy="")


ZEROTH: dict[str, Any] = {"method": "zeroth-order"}
ADAMW: dict[str, Any] = {"method": "adamw", "lr": 1e-3}
METHODS: dict[str, dict[str, Any]] = {
    "zeroth-order": ZEROTH,
    "adamw of an adapter": {**ADAMW, "lora_rank": 2},
    **{name: {"method": name, "lr": 1e-3} for name in ("mezo", "adamw", "sgd", "lomo", "badam")},
    "lora": {"method": "lora", "lora_rank": 2},
    "lora+lomo": {"method": "lora+lomo", "lora_rank": 2, "base_lr": 1e-3},
}
OTHER: dict[str, Any] = {  # another value than the default
    "adapter": Path("adapter"),
    "adapter_frozen": ("lora_A",),
    "activation_memory": "1GiB",
    "beta": 0.2,
    "betas": (0.8, 0.9),
    "clip_grad": 1.0,
    "clip_median": 2.0,
    "device": "cuda:1",
    "device_memory": "6GiB",
    "estimator": EstimatorName.FZOO,
    "eval_split": 0.5,
    "evaluate_every": 2,
    "evaluation": Path("rows.jsonl"),
    "fitness": Fitness.RANKS,
    "head": "sequence-classification",
    "lora_targets": ("q_proj",),
    "max_grad_norm": 1.0,
    "max_grad_norm_per": "layer",
    "max_drift": 0.5,
    "lora_rank": 4,
    "lr": 1e-2,
    "method": "adamw",
    "momentum": 0.5,
    "noise": Noise.GAUSSIAN,
    "objective": "accuracy",
    "reward": ("length",),
    "reward_memory": "2GiB",
    "state_bits": 8,
    "top_p": 0.5,
    "transfer_dtype": "bfloat16",
    "write_back_every": 3,
    "write_limit_tb": 1.0,
}
INVALID = {
    "eval_split": 1.0,
    "betas": (0.9, math.nan),
    "activation_memory": "8 cats",
    "memory": "8 cats",
}
INVALID |= {"warmup_steps": -1, "weight_decay": -0.1, "temperature": -0.1}
INVALID |= {"device_memory": "8 cats", "seed": 1 << 70, "samples": -1, "momentum": -0.1}


def with_values(options: Any, values: dict[str, Any]) -> Any:
    changes: dict[str, Any] = {}
    for option in fields(options):
        value = getattr(options, option.name)
        if is_dataclass(value):
            changes[option.name] = with_values(value, values)
        elif option.name in values:
            changes[option.name] = values[option.name]
    return replace(options, **changes)


def require(**values: Any) -> None:
    require_valid(with_values(zeroth_order(), values))


def zeroth_order() -> TrainOptions:
    optimization = Optimization(method="zeroth-order")
    return TrainOptions(
        model="base", data=Path("rows.jsonl"), output=Path("run"), optimization=optimization
    )


def other(name: str) -> Any:
    defaults = {option: default for option, _, default in leaves_of(RunOptions())}
    if name in OTHER:
        return OTHER[name]
    return not defaults[name] if isinstance(defaults[name], bool) else (defaults[name] or 1) + 1


EFFECTS = [
    (name, method)
    for name, row in OPTIONS.items()
    for method, given in METHODS.items()
    if not row.effect.applies(given["method"], trains_adapter="lora_rank" in given)
]


@pytest.mark.parametrize(("name", "method"), EFFECTS)
def test_what_has_no_effect_is_refused_by_name(name: str, method: str) -> None:
    beside: dict[str, Any] = {"rank": 4} if name in ("period", "stack") else {}
    if dict(NEEDED).get(name) == ["reward"]:
        beside = {"reward": ("length",)}
    with pytest.raises(OptionError) as refused:
        require(**METHODS[method], **beside, **{name: other(name)})
    assert refused.value.where in (name, *beside)
    excluded = [*OPTIONS[name].excludes.values(), *OPTIONS["reward"].excludes.values()]
    told = refused.value.expected
    assert "it has no effect otherwise" in told or told in excluded or "reward" in beside


@pytest.mark.parametrize(("name", "excluded", "expected"), EXCLUDED)
def test_what_excludes_each_other_is_refused_by_name(
    name: str, excluded: str, expected: str
) -> None:
    with pytest.raises(
        OptionError, match=f"^{name}: found .* with {flag(excluded)}.*; expected"
    ) as refused:
        require(**{name: other(name), excluded: other(excluded)})
    assert refused.value.expected == expected


def first_method(name: str) -> dict[str, Any]:
    """The first of the methods with which an option has an effect."""
    return next(
        given
        for given in METHODS.values()
        if OPTIONS[name].effect.applies(given["method"], trains_adapter="lora_rank" in given)
    )


@pytest.mark.parametrize(("name", "needed"), NEEDED)
def test_what_is_needed_is_named(name: str, needed: list[str]) -> None:
    method = first_method(name)
    with pytest.raises(OptionError, match=f"^{name}: found .*; expected {flag(needed[0])}"):
        require(**method, **{name: other(name)})
    needs, _, value = needed[0].partition("=")
    of_needed = {needs: EstimatorName(value) if needs == "estimator" else value or other(needs)}
    require(**method, **{name: other(name), **of_needed})


DEFAULTS = {one.name: one.default for one in declared(RunOptions())}
ASKED = [name for name, default in DEFAULTS.items() if default not in (None, False, ())]
AT_DEFAULT = [(name, method) for name, method in EFFECTS if name in ASKED]
AT_DEFAULT += [(name, "zeroth-order") for name, _ in NEEDED if name in ASKED]


@pytest.mark.parametrize(("name", "method"), AT_DEFAULT)
def test_what_is_given_has_an_effect_also_with_the_value_that_it_has_by_default(
    name: str, method: str
) -> None:
    options = with_values(zeroth_order(), METHODS[method])
    require_valid(options)
    with pytest.raises(OptionError, match=f"^{name}: found ") as refused:
        require_valid(options, given={name})
    assert refused.value.remedy.endswith(("leave one of the two out", "leave this out"))


# further words of a command, and what is refused of it; None: nothing is
GIVEN: list[tuple[str, str | None]] = [
    (
        "--method adamw --lr 1e-2 --queries 1",
        "--queries: found 1 with --method adamw; expected --m",
    ),
    ("--method adamw --lr 1e-2 --write-back-every auto", "--write-back-every: found auto with"),
    ("--method adamw --state-bits 32 --lr 1e-2 --lora-rank 2", "--state-bits: found 32"),
    ("--period 100", "--period: found 100; expected --rank"),
    ("--reward-seconds 5", "--reward-seconds: found 5.0; expected --reward"),
    ("--no-keep-best --no-pack --samples 0 --report-to none", None),
    ("--method adamw --betas 0.8 0.9 --betas None --method sgd --lr 1e-2", None),
    ("--method sgd --betas 0.8 0.9 --lr 1e-2", "--betas: found 0.8 0.9 with --method sgd"),
    ("--estimator mezo --fitness scaled", "--fitness: found scaled; expected --estimator es"),
    ("--fitness scaled", "--fitness: found scaled; expected --estimator es"),
    ("--estimator es --fitness scaled --queries 2", None),
    ("--estimator mezo --queries 1", None),
    ("--rank 2 --write-back-every auto", None),
    ("--rank 2 --write-back-every never", None),
    ("--rank 2 --write-back-every 3", "--write-back-every: found 3 with --rank; expected auto or"),
    ("--lora-rank 2 --write-back-every auto", "--write-back-every: found auto with --method zero"),
    ("--lora-rank 2 --snapshot-every 2", "--snapshot-every: found 2 with --method zeroth-order an"),
    ("--method adamw --lr 1e-2 --state-bits 8", None),
]


@pytest.mark.parametrize(("words", "told"), GIVEN, ids=[words for words, _ in GIVEN])
def test_what_a_command_gives_is_known_and_not_compared(words: str, told: str | None) -> None:
    paths = ["--model", "base", "--data", "here:train", "--output", "run"]
    paths += ["--method", "zeroth-order"]
    command: Train = parse_command("train", Train, [*paths, *words.split()])
    if told is None:
        command.options.require_valid(given=command.given)
        return
    with pytest.raises(OptionError) as refused:
        command.options.require_valid(given=command.given)
    assert told in error_line(refused.value, command)


def test_a_recipe_gives_its_options_unless_the_command_line_chooses_another_method(
    here: Path,
) -> None:
    recipe = "model: base\ndata: rows.jsonl\noutput: run\nbatch_size: 3\nsteps: 2\nqueries: 1\n"
    Path("recipe.yaml").write_text(f"{recipe}method: zeroth-order\n")
    other = ("--method", "adamw", "--lr", "1e-2", "--output", "another")
    done("train", "recipe.yaml", *other)
    done("train", "recipe.yaml")
    done("train", "run/recipe.yaml", "--output", "again")
    done("plan", "run/recipe.yaml", *other)
    Path("recipe.yaml").write_text(f"{recipe}method: adamw\nlr: 1e-2\n")
    assert "--queries: found 1 with --method adamw" in refusal("train", "recipe.yaml")
    resumed = ("train", "--resume", "run", "--reward-seconds", 5)
    assert "--reward-seconds: found 5.0; expected --reward" in refusal(*resumed)
    assert "--lr: found 1e-06; expected none" in refusal(
        *(
            "tune",
            "--method",
            "zeroth-order",
            "--model",
            "base",
            "--data",
            "rows.jsonl",
            "--output",
            "tuned",
            "--lr",
            "1e-6",
        )
    )
    assert "--zo-eps: found 0.001 with --method adamw" in refusal(
        *("verify", "--model", "base", "--method", "adamw", "--zo-eps", "1e-3")
    )
    path = Path("run/options.json")
    record = json.loads(path.read_text())
    del record["sha256"]
    record["options"]["rows"]["too_long"] = "drop"
    record["options"]["transfer_dtype"] = "float8"
    path.write_text(checked_json.to_text(record))
    assert "--transfer-dtype: found stored; expected float8, as in the run" in refusal(
        *("evaluate", "--run", "run", "--transfer-dtype", "stored")
    )
    for given, taken in (([], "drop"), (["--too-long", "auto"], "auto")):
        evaluate = parse_command("evaluate", Evaluate, ["--run", "run", *given])
        assert evaluate._with_options_of_run().rows.too_long == taken


@pytest.mark.parametrize("name", [name for name, row in OF_RUNS.items() if row.check is not None])
def test_what_is_out_of_its_range_is_refused_by_name(name: str) -> None:
    method = first_method(name)
    beside = {"lora_rank": 2} if name == "lora_alpha" else {}
    with pytest.raises(OptionError, match=f"^{name}: found "):
        require(**{**method, **beside, name: INVALID.get(name, 0)})


CHOSEN: list[tuple[str, str, int | None, float | None, str | None]] = [
    # words of a command, and the method, rank, learning rate and optimizer of its run
    ("", "lora", 8, 2e-4, "adamw"),
    ("--lora-rank 2 --lr 1e-3", "lora", 2, 1e-3, "adamw"),
    ("--adapter adapter", "lora", None, 2e-4, "adamw"),
    ("--method adamw --lr 1e-5", "adamw", None, 1e-5, "adamw"),
    ("--method sgd --lora-rank 4 --lr auto", "sgd", 4, None, "sgd"),
    ("--method zeroth-order", "zeroth-order", None, 1e-6, None),
    ("--method mezo --lora-rank 4", "mezo", 4, 1e-6, None),
]


@pytest.mark.parametrize(("words", "method", "rank", "lr", "optimizer"), CHOSEN)
def test_a_method_says_what_is_trained_and_how(
    words: str, method: str, rank: int | None, lr: float | None, optimizer: str | None
) -> None:
    paths = ["--model", "base", "--data", "here:train", "--output", "run"]
    command: Train = parse_command("train", Train, [*paths, *words.split()])
    options = command.options
    options.require_valid(given=command.given)
    chosen = options.optimization
    assert (chosen.method, options.model_options.lora_rank) == (method, rank)
    assert (chosen.lr, chosen.optimizer) == ("auto" if lr is None else lr, optimizer)
    assert chosen.is_exact == (method == "mezo")
    told = command._chosen_method(options)
    assert told == f"method: {method}" + (
        ", as asked for" if "--method" in words else ", by default; --method names others"
    )
    saved = options.to_json()
    assert TrainOptions.from_json(saved, Path("run")).to_json() == saved


@pytest.mark.parametrize(("every", "is_kept"), [("auto", False), ("never", True)])
def test_a_recipe_says_that_factors_are_not_written(every: Any, is_kept: bool) -> None:
    options = zeroth_order().having(rank=2, write_back_every=every)
    options.require_valid(given={"write_back_every"})
    assert ("write_back_every: never" in recipe_text(options)) == is_kept


def test_a_method_without_a_default_rate_asks_for_one(here: Path) -> None:
    command = ("--model", "base", "--data", "rows.jsonl", "--output", "run")
    for method in ("adamw", "sgd", "lomo", "adalomo", "badam"):
        assert f"--lr: found nothing; expected a learning rate for {method}" in refusal(
            "train", *command, "--method", method
        )
        done("plan", *command, "--method", method)


ADAPTED, IN_TURNS = METHODS["adamw of an adapter"], METHODS["badam"]
# by rows of the table, which the tests above take from it
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**ADAMW, "write_back_every": 4}, "write_back_every"),
    ({**ADAMW, "zo_eps": 1e-2}, "zo_eps"),
    ({**ADAMW, "switch_every": 3}, "switch_every"),
    ({**METHODS["lomo"], "switch_every": 2}, "switch_every"),
    ({**ADAMW, "max_grad_value": 0}, "max_grad_value"),
    ({**ADAMW, "transfer_dtype": "float8"}, "transfer_dtype"),
    ({**ADAMW, "queries": 2}, "queries"),
    ({**ADAMW, "delayed_update": True, "stream_blocks": True}, "delayed_update"),
    ({**METHODS["lomo"], "delayed_update": True}, "delayed_update"),
    ({**METHODS["sgd"], "state_bits": 8}, "state_bits"),
    ({**ADAPTED, "state_bits": 8}, "state_bits"),
    ({**ADAPTED, "zo_eps": 1e-2}, "zo_eps"),
    ({**ADAPTED, "write_limit_tb": 1.0}, "write_limit_tb"),
    (
        {
            **IN_TURNS,
            "stream_blocks": True,
            "keep_best": True,
            "evaluation": Path("rows.jsonl"),
            "evaluate_every": 2,
        },
        "keep_best",
    ),
    ({"head": "sequence-classification", "rank": 2, "per_row": True}, "per_row"),
    ({"head": "sequence-classification", "beta": 0.5}, "beta"),
    ({"period": 5}, "period"),
    ({"evaluate_every": 5}, "evaluate_every"),
    ({"lora_targets": ("q_proj",)}, "lora_targets"),
    ({"lora_alpha": 4}, "lora_alpha"),
    ({"lora_rank": 2, "lora_alpha": 0}, "lora_alpha"),
    ({"activation_memory": "much"}, "activation_memory"),
    ({"zo_eps": -1.0}, "zo_eps"),
    ({"seed": 10**400}, "seed"),
    *(
        ({name: 0}, name)
        for name in (
            "lr",
            "steps",
            "batch_size",
            "queries",
            "micro_batch_size",
            "loss_chunk",
            "lora_rank",
        )
    ),
    *(
        ({name: 0}, name)
        for name in ("sequence_length", "snapshot_every", "write_back_every", "evaluate_every")
    ),
]


@pytest.mark.parametrize(("values", "named"), REFUSED)
def test_the_table_has_the_rows_that_it_needs(values: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=f"^{named}: found "):
        require(**values)


def test_a_recipe_may_have_its_options_in_sections(
    saved: TrainOptions,
) -> None:
    recipe = Path("recipe.yaml")
    recipe.write_text(
        "model: {model: base}\nschedule: {lr: 1e-4}\ndata: rows.jsonl\noutput: other\n"
    )
    command: Train = parse_command("train", Train, ["recipe.yaml", "--schedule.steps", "7"])
    assert (command.model, command.optimization.lr, command.steps) == ("base", 1e-4, 7)
    earlier = (
        "model: base\ndata: rows.jsonl\noutput: other\nmethod: adamw\nbetas: [0.8, "
        "0.95]\nstream_blocks: false\n"
    )
    recipe.write_text(
        f"{earlier}max_grad_norm: 0.5\neval_split: 0.25\ntext_column: a, b\nlabel_column: null\n"
    )
    command = parse_command("train", Train, ["recipe.yaml", "--state-bits", "8"])
    given = command.optimization
    assert (given.method, given.betas, given.max_grad_norm, given.state_bits) == (
        "adamw",
        (0.8, 0.95),
        0.5,
        8,
    )
    assert (command.eval_split, command.evaluation, command.rows.text_column) == (
        0.25,
        None,
        "a, b",
    )
    for text, told in (
        ("data: {lr: 1e-4}\n", "lr in the section data; expected it in the section schedule"),
        (
            "clip: {norm: 1}\n",
            "clip; expected max_grad_norm, max_grad_value, clip_grad, clip_median",
        ),
        ("lr: [1, 2]\n", "recipe.yaml: found 2 values as lr; expected a single value"),
    ):
        recipe.write_text(text)
        with pytest.raises(OptionError, match=told):
            parse_command("train", Train, ["recipe.yaml"])


SWITCHES = [option.name for option in option_fields(Train) if option.type is bool]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_of_a_recipe_is_a_bool_in_every_spelling(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for written, expected in (
        *((word, True) for word in ("true", "TRUE", "yes", "on", "'true'", '"Yes"')),
        *((word, False) for word in ("false", "False", "no", "off", "'off'", '"NO"')),
    ):
        recipe.write_text(f"model: base\n{name}: {written}\n")
        command: Train = filled_in("train", Train, values_of_recipe(recipe))
        values = {field: value for field, value, _ in leaves_of(command)}
        assert values[name] is expected, written
    for written in ("1", "maybe", "[true]", "null", "''", "{on: 1}"):
        recipe.write_text(f"{name}: {written}\n")
        with pytest.raises(OptionError) as refused:
            values_of_recipe(recipe)
        assert (refused.value.where, refused.value.expected) == (str(recipe), "true or false")
        assert refused.value.remedy == f"write {name}: true, or {name}: false"


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {*SWITCHES}))
def test_what_is_no_switch_is_not_a_bool_in_a_recipe(name: str) -> None:
    for written in (True, False):
        with pytest.raises(OptionError) as refused:
            values_of_recipe({name: written})
        assert refused.value.found == f"{str(written).lower()} as {name}"


def test_what_an_earlier_recipe_says_can_be_taken_back_by_options_with_the_same_keys() -> None:
    given = {
        "model": "base",
        "method": "badam",
        "stream_blocks": True,
        "betas": [0.8, 0.9],
        "eval_split": 0.25,
        "rank": 2,
    }
    later = {
        "stream_blocks": False,
        "betas": None,
        "evaluation": "rows.jsonl",
        "eval_split": None,
        "period": 7,
    }
    command: Train = command_of(
        "train", Train, {**values_of_recipe(given), **values_of_recipe(later)}
    )
    method = command.optimization
    assert (method.method, method.stream_blocks, method.betas) == ("badam", False, None)
    assert (command.evaluation, command.eval_split) == (Path("rows.jsonl"), None)
    assert (command.optimization.rank, command.optimization.period) == (2, 7)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("--adam-beta1 0.8", "did you mean --betas"),
        ("--eval-splt 0.1", "did you mean --eval-split"),
        ("--betas 0.8", "1 value after --betas; expected 2 values"),
        ("--columns prompt=q", "'prompt=q' as --columns; .* write --prompt-column q"),
        ("--columns", "unknown option --columns; expected --text-column, --prompt-column, "),
        ("--clip norm=1,median=3", "write --max-grad-norm 1 --clip-median 3"),
        ("--method=adamw:betas=0.8,0.9,stream_blocks", "--betas 0.8 0.9 --stream-blocks"),
        ("--method stream_blocks=false", "write --stream-blocks false"),
        ("--estimator mezo:exact", "write --method mezo"),
        (
            "--estimator es:fitness=ranks,exact",
            "write --estimator es --fitness ranks --method mezo",
        ),
        ("--precision transfer=float8", "write --transfer-dtype float8"),
        ("--objective dpo:beta=0.3", "write --objective dpo --beta 0.3"),
        ("--rank 8:period=5", "write --rank 8 --period 5"),
        ("--memory 6GB:activations=1GB", "write --memory 6GB --activation-memory 1GB"),
        ("--reward-options seconds=5,top_p=1", "write --reward-seconds 5 --top-p 1"),
        ("--train-on all:rendered_at=2026-01-02", "write --train-on all --rendered-at 2026-01-02"),
        ("--evaluation 0.1", "'0.1' as --evaluation; .* write --eval-split 0.1"),
    ],
)
def test_what_was_a_setting_is_refused_with_the_option_that_it_is_now(
    written: str, told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        parse_command("train", Train, written.split())
    command = parse_command("train", Train, ["--objective", "own.py:beta", "--memory", "2GiB"])
    assert (command.objective, command.storage.memory) == ("own.py:beta", "2GiB")


RUN = (
    "train",
    "--method",
    "zeroth-order",
    "--model",
    "base",
    "--data",
    "rows.jsonl",
    "--output",
    "all",
    "--runs",
    "runs.yaml",
    "--batch-size",
    2,
)


def test_runs_that_go_on_refuse_other_options_and_take_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("runs.yaml").write_text("one: {rank: 2}\n")
    assert run_here(*RUN, "--steps", 2, "--lr", 1e-3).status == 0
    changes = ("--seed", 3), ("--lr", 2e-3), ("--weight-decay", 0.1), ("--eval-split", 0.5)
    for option, value in changes:
        told = refusal(*RUN, "--steps", 3, "--lr", 1e-3, option, value)
        assert told.startswith(f"zo2: one, {option}: found {value}; expected ")
    assert "--lr: found 1e-06" in refusal(*RUN, "--steps", 3), (
        "it was left out, which is another rate"
    )
    Path("runs.yaml").write_text("one: {rank: 3}\n")
    assert "--rank: found 3; expected 2" in refusal(*RUN, "--steps", 3, "--lr", 1e-3)
    Path("runs.yaml").write_text("one: {rank: 2}\n")
    assert run_here(*RUN, "--steps", 3, "--lr", 1e-3, "--memory", "4GiB").status == 0
    options = json.loads(Path("all/one/options.json").read_text())["options"]
    assert (options["steps"], options["storage"]["memory"]) == (3, "4GiB")


RECIPE = """\
# rates need no dot, as on the command line
model: base
data: rows.jsonl
output: run
steps: 4
lr: 1e-2
batch-size: 3
method: zeroth-order
noise: gaussian
guard: false
"""


@pytest.fixture
def here(here: Path) -> Path:
    Path("recipe.yaml").write_text(RECIPE)
    return here


def journal_of(run: str) -> bytes:
    return (Path(run) / "journal.jsonl").read_bytes()


def refused_recipe(text: str) -> str:
    """What is said about a recipe that is refused; nothing of its run is left."""
    Path("recipe.yaml").write_text(text)
    line = refusal("train", "recipe.yaml")
    assert "recipe.yaml" in line
    assert not Path("run").exists()
    return line


def test_a_recipe_runs_as_the_command_line_with_the_same_options_and_python_runs_it(
    here: Path,
) -> None:
    done("train", "recipe.yaml")
    same = ["--steps", 4, "--lr", "1e-2", "--batch-size", 3, "--noise", "gaussian", "--no-guard"]
    done(
        "train",
        "--method",
        "zeroth-order",
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--output",
        "given",
        *same,
    )
    assert journal_of("run") == journal_of("given")
    written = Path("run/recipe.yaml").read_bytes()
    Path("run/recipe.yaml").unlink()  # as if it was killed before
    done("train", "--resume", "run")
    assert Path("run/recipe.yaml").read_bytes() == written
    done("train", "recipe.yaml", "--steps", 2, "--output", "short", "--guard")
    assert len(Journal("short/journal.jsonl").updates) == 2
    recipe = yaml.safe_load(Path("short/recipe.yaml").read_text())
    assert (recipe["steps"], recipe["guard"], recipe["noise"]) == (2, True, "gaussian")
    assert train("recipe.yaml", {"output": "python"}) == Path("python")
    values = {**yaml.safe_load(RECIPE), "data": Path("rows.jsonl"), "output": "mapped"}
    train(values)
    train(here / "recipe.yaml", {"output": "overridden", "steps": 2})
    assert journal_of("mapped") == journal_of("python") == journal_of("run")
    assert len(Journal("overridden/journal.jsonl").updates) == 2
    with pytest.raises(OptionError, match="did you mean batch_size"):
        train({**values, "per_device_train_batch_size": 3})


def test_a_recipe_is_planned_as_the_command_line_with_the_same_options(here: Path) -> None:
    Path("recipe.yaml").write_text(RECIPE + "rank: 2\n")
    told = done("plan", "recipe.yaml")
    assert told.out.startswith("Zeroth-order steps train all parameters: 4 steps of 3 rows\n")
    assert told.err == ""
    same = (
        "--steps",
        4,
        "--batch-size",
        3,
        "--noise",
        "gaussian",
        "--rank",
        2,
        "--data",
        "rows.jsonl",
    )
    given = json.loads(
        done("plan", "--method", "zeroth-order", "--model", "base", *same, "--json").out
    )
    planned = json.loads(done("plan", "recipe.yaml", "--json").out)
    names = ("steps", "evaluations", "scratch_bytes", "written_bytes")
    assert [planned[name] for name in names] == [given[name] for name in names]
    assert "7 steps of 3 rows" in done("plan", "recipe.yaml", "--steps", 7).out.splitlines()[0]
    done("train", "recipe.yaml")
    assert "4 steps of 3 rows" in done("plan", "run/recipe.yaml").out.splitlines()[0]


def test_a_plan_says_what_a_run_takes_beside_it(here: Path) -> None:
    Path("recipe.yaml").write_text(
        RECIPE.replace("lr: 1e-2", "lr: auto") + "samples: 2\ndevice: cuda\n"
    )
    told = done("plan", "recipe.yaml", "--device-memory", "1GiB")
    assert told.err == "not in the plan: the short runs that choose lr, the answers to 2 samples\n"
    assert "device memory" in told.out
    assert "--device-memory: found auto; expected the memory of the GPU" in refusal(
        "plan", "recipe.yaml"
    )


def test_the_recipe_of_a_branch_repeats_the_branch(here: Path) -> None:
    done("train", "recipe.yaml")
    done("train", "--resume", "run", "--from-step", 2, "--output", "branch", "--lr", 1e-4)
    done("train", "branch/recipe.yaml", "--output", "again")
    assert journal_of("again") == journal_of("branch") != journal_of("run")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("learning_rate", "lr"),
        ("learning-rate", "lr"),
        ("stepz", "steps"),
        ("max_steps", "steps"),
        ("per_device_train_batch_size", "batch_size"),
        ("evaluate_evry", "evaluate_every"),
        ("save_steps", "snapshot_every"),
        ("load_best_model_at_end", "keep_best"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(
    here: Path, key: str, nearest: str
) -> None:
    line = refused_recipe(f"{RECIPE}{key}: 1\n")
    assert line.startswith(
        f"zo2: recipe.yaml: found the key {key}; expected an option of zo2 train; did you mean "
        f"{nearest}."
    )


def test_a_name_that_only_contains_another_one_is_not_taken_for_it_and_a_refusal_lists_all() -> (
    None
):
    few = refusal("rows", "--qqqq", 1)
    assert all(f"--{name.replace('_', '-')}" in few for name in option_names(WriteRows))
    assert "recipe.yaml: found No such file" in refusal("train", "other/recipe.yaml")
    others = (
        "logging_steps data_seed hub_model_id metric_for_best_model deepspeed lr_scheduler_kwargs "
        "do_train"
    )
    names = option_names(Train)
    assert [nearest_name(key, names) for key in others.split()] == [None] * 7
    assert all(nearest_name(name, names) == name for name in names)


def test_a_plan_takes_the_options_of_a_run(here: Path) -> None:
    given = ("--model", "base", "--data", "rows.jsonl", "--batch-size", 3, "--steps", 3)
    more = (
        "--lr",
        0.3,
        "--objective",
        "loss",
        "--seed",
        3,
        "--method",
        "mezo",
        "--no-guard",
        "--samples",
        2,
    )
    told = done("plan", "--method", "zeroth-order", *given, *more)
    assert "3 steps of 3 rows" in told.out
    assert told.err == "not in the plan: the answers to 2 samples\n"
    assert (
        "every 3 steps"
        in done("plan", "--method", "zeroth-order", *given, "--write-back-every", 3).out
    )
    files = sorted(Path().iterdir())
    by_option, by_command = (
        json.loads(done(*command, *given, "--json").out)
        for command in (("train", "--plan"), ("plan",))
    )
    assert by_option.keys() == by_command.keys()
    assert sorted(Path().iterdir()) == files
    done("train", "--method", "zeroth-order", "--output", "planned", *given)
    assert "3 steps of 3 rows" in done("plan", "--resume", "planned").out
    assert json.loads(Path("planned/options.json").read_text())["options"]["steps"] == 3, (
        "nothing was saved"
    )
    write_rows(Path("others.jsonl"), ROWS[:4])
    for refused, named in (
        (["--steps", 2], "--steps: found 2; expected at least 3, the steps that the run has"),
        (["--data", "others.jsonl"], "--data: found others.jsonl, which has the sha256"),
        (["--from-step", 4, "--output", "new"], "--from-step: found 4; expected at most 3"),
    ):
        lines = [refusal(name, "--resume", "planned", *refused) for name in ("train", "plan")]
        assert lines[0] == lines[1]
        assert named in lines[0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{RECIPE}optimization:\n  lr: 1\n", "the key optimization"),
        (f"{RECIPE}lr: 1e-3\n", "no YAML (the key lr twice)"),
        ("a: 1\na: 2\n", "no YAML (the key a twice)"),
        ("lr:\t1\n", "no YAML (found character '\\t' that cannot start any token)"),
        ("lr: @x\n", "no YAML (found character '@' that cannot start any token)"),
        ("lr: *y\n", "no YAML (found undefined alias 'y')"),
        (f"{RECIPE}batch_size: 3\n", "the key batch_size twice"),
        (f"{RECIPE}seed: {{a: 1}}\n", "a mapping as seed"),
        (f"{RECIPE}seed: [[1]]\n", "a list as seed"),
        (f"{RECIPE}seed: many\n", "'many' as --seed; expected a whole number"),
        (f"{RECIPE}head: odd\n", "'odd' as --head; expected one of causal-lm"),
        (f"{RECIPE}seed: 2001-99-99\n", "'2001-99-99' as --seed; expected a whole number"),
        (f"{RECIPE}labels: [true, false]\n", "[true, false] as labels"),
        (f"{RECIPE}labels: [null, null]\n", "[null, null] as labels"),
        ("- steps\n", "a list"),
        ("steps\n", "a text"),
        ("", "nothing"),
        (
            "steps: !!python/object/apply:os.getcwd []\n",
            "no YAML (could not determine a constructor",
        ),
        ("[" * 5000, "maximum recursion depth"),
        ("#" * (1 << 20) + "\n", "more than 1 MiB"),
        ("a: \0\n", "unacceptable character"),
        (
            f"{RECIPE}qqqq: 1\n",
            "the key qqqq; expected an option of zo2 train. What to do: see zo2 train --help-all.",
        ),
        (f'{RECIPE}labels: [yes, "n\\0"]', "NUL in the value of labels;"),
        (f'{RECIPE}reward: "a\\0.py:f"', "NUL in the value of reward;"),
        (RECIPE.replace("data: rows.jsonl", 'data: "rows\\0.jsonl"'), "NUL in the value of data;"),
    ],
    ids=range(25),
)
def test_a_recipe_that_says_nothing_usable_is_refused_in_one_line(
    here: Path, text: str, found: str
) -> None:
    assert f"found {found}" in refused_recipe(text)
    assert refused_recipe("model: base\nsteps: [1\nlr: 2\n").startswith(
        "zo2: recipe.yaml, line 3: found "
    )


def test_texts_and_paths_of_any_bytes_of_a_recipe_stay_what_was_written(here: Path) -> None:
    Path("texts.yaml").write_text(
        "labels: [no, yes, On, 1:30, 010, 1_0, 2001-01-01, 1.50]\nguard: false\n"
    )
    labels = ["no", "yes", "On", "1:30", "010", "1_0", "2001-01-01", "1.50"]
    assert read_recipe(Path("texts.yaml")) == {"labels": labels, "guard": False}
    odd: Any = "r\udcffows 'ü': #.jsonl"
    shutil.copy("rows.jsonl", odd)
    done("train", "recipe.yaml", "--data", odd)
    done("train", "run/recipe.yaml", "--output", "again")
    assert journal_of("again") == journal_of("run")


def test_a_recipe_and_a_report_have_the_options_of_the_runs_method_alone(here: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("matplotlib")
    same = (
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--steps",
        2,
        "--lr",
        "1e-2",
        "--batch-size",
        3,
    )
    done("train", "--method", "zeroth-order", *same, "--output", "zeroth")
    done("train", *same, "--output", "first", "--method", "adamw", "--lora-rank", 2)
    first, zeroth = ((Path(run) / "recipe.yaml").read_text() for run in ("first", "zeroth"))
    assert "\nmethod: adamw\n" in first
    assert "weight_decay" in first
    assert "zo_eps" not in first
    assert "zo_eps" in zeroth
    assert "momentum" not in zeroth
    for run, own, others in (("first", ">method<", "zo_eps"), ("zeroth", ">zo_eps<", "momentum")):
        done("report", run, "-o", f"{run}.html")
        page = Path(f"{run}.html").read_text()
        assert own in page
        assert others not in page
    done("train", "first/recipe.yaml", "--output", "again")
    assert journal_of("again") == journal_of("first")
