"""Draw valid command lines at random from the declarations of options, run each in this process,
and count how they end.

    python tools/command_walk.py --lines 300 --output walk.json

Types, ranges, `effect`, `needs` and `excludes` of each option say what is valid beside what was
drawn before, and the registry of tasks says which objectives go with which rows. Texts and paths
have no such declaration: those that are tried are in a table below, and options without a row there
are not drawn. The model is tiny and random, in a temporary directory. A line ends in a result, in a
refusal of one line, or in a fault: a
traceback, a failed comparison, or no line. Prints a table and JSON.
"""

import contextlib
import io
import json
import os
import random
import shlex
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

import torch
from families import small_config, small_model
from measuring import command
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from zo2adapters.cli import REFUSED, command_class, main
from zo2adapters.commands.options import OptionField, option_fields
from zo2adapters.tasks.option_tree import ADAPTERS as ADAPTER_EFFECT
from zo2adapters.tasks.option_tree import BOTH, MethodName, Option, is_met, plain
from zo2adapters.tasks.registry import AUTO, FUNCTION, REWARD, TASKS, find_task
from zo2adapters.tasks.row_options import RowFormat
from zo2adapters.trainers.optimization import optimizer_of

# how often each command is drawn, out of the sum
WEIGHTS = {
    "plan": 40,
    "train": 14,
    "evaluate": 8,
    "generate": 8,
    "export": 6,
    "init": 6,
    "rows": 2,
    "tune": 2,
    "verify": 3,
    "journal": 3,
    "report": 2,
    "merge": 2,
    "convert": 3,
    "chat": 2,
}
OF_RUNS = {"plan", "train", "tune"}
ADAPTERS = ("adapter", "lora_rank")  # which decide about other options
OF_STEPS = {"evaluate", "generate", "chat", "export", "merge"}  # of a run that is there
MOST_DRAWN = 6  # options of a line beside those that it has to have
MOST_ABOVE = 4  # a number is at most so much above its least value
WORDS = ["<pad>", "<bos>", "</s>", "<unk>"]
WORDS += ["the", "cat", "sat", "ran", "dog", "is", "yes", "no", "on", "a", "mat", "why"]
ROWS: Mapping[RowFormat, Sequence[Mapping[str, object]]] = {
    RowFormat.TEXT: [
        {"prompt": f"the {word}", "completion": f" {other}"}
        for word in WORDS[5:9]
        for other in WORDS[9:12]
    ],
    RowFormat.CANDIDATES: [
        {"prompt": f"the {word} is", "candidates": [" yes", " no"], "answer": " no"}
        for word in WORDS[5:12]
    ],
    RowFormat.PREFERENCES: [
        {"prompt": f"the {word}", "chosen": " sat", "rejected": " ran"} for word in WORDS[5:12]
    ],
}
# texts and paths that are tried, by option; {} is the folder
TEXTS: Mapping[str, Sequence[str]] = {
    "memory": ("auto", "8GiB", "6000MB"),
    "activation_memory": ("16MiB", "64MiB"),
    "reward_memory": ("1GiB", "2GiB"),
    "reward": ("length", "exact-match", "length exact-match=0.5"),
    "lora_targets": ("auto", "q_proj v_proj", "all-linear"),
    "adapter_frozen": ("lora_A",),
    "adapter": ("{}/lora/model",),
    "prompt_template": ("{{prompt}}",),
    "rendered_at": ("2026-01-31T12:00:00",),
    "learning_rates": ("1e-4 1e-3",),
    "zo_eps_to_try": ("1e-3 1e-2",),
    "split": ("auto",),
    "prompt": ("the cat", "the dog is"),
    "trace": ("{}/{number}.trace.json",),
    "betas": ("0.8 0.95", "0.9 0.999"),
    "report_to": ("none",),  # others need a package
    "others": ("{}/lora",),
    "sequence_length": ("16", "24"),  # the rows are shorter
    "head": ("causal-lm",),  # another one needs another model
    "at": ("1", "2"),
    "warmup_steps": ("0", "1"),  # fewer than the steps
    "last": ("1",),
}


STATUSES = ("ran", "refused", "fault")


class Ended(NamedTuple):
    """How a command line ended."""

    line: str
    status: str
    said: str  # the refusal, or the traceback


class Walk:
    """Draws command lines.

    Args:
        place: Folder of the files that they name. See ``make_place``.
        seed: Lines follow from it.
        weights: How often each command is drawn.
    """

    def __init__(self, place: Path, seed: int, weights: Mapping[str, int]) -> None:
        self._place = place
        self._weights = weights
        self._random = random.Random(seed)
        self._number = 0

    def line(self) -> list[str]:
        """The next command line."""
        self._number += 1
        [name] = self._random.choices(list(self._weights), list(self._weights.values()))
        listed = {one.field: one for one in option_fields(command_class(name))}
        fixed = self._fixed(name)
        values = dict[str, Any]()
        if name in OF_RUNS:
            values = self._of_run(listed)
            if name == "tune":
                values.pop("lr", None)
            fixed["data"] = self._rows(values["rows"])
        elif "method" in listed:
            values["method"] = self._random.choice(list(listed["method"].named))
        if name == "export" and fixed["run_directory"].endswith("lora"):
            fixed["output_dtype"] = "auto"  # an adapter has one dtype
        free = [
            one
            for one in listed.values()
            if one.field not in fixed
            and not (name in OF_RUNS and one.field in ADAPTERS)
            and not (name in OF_STEPS and _is_of_start(one))
            and not (name == "tune" and one.option is not None and one.option.untried)
        ]
        for one in self._random.sample(free, self._random.randint(0, min(MOST_DRAWN, len(free)))):
            self._add(one, values, listed)
        words = [name]
        for field, value in fixed.items():
            option = listed[field]
            words += [*([] if option.is_positional else [option.flag]), *shlex.split(value)]
        for field, value in values.items():
            if field not in (*fixed, "rows"):
                words += self._written(listed[field], value)
        return words

    def _fixed(self, name: str) -> dict[str, str]:
        """Options that a line of a command has to have, or whose files have to go together."""
        place = self._place
        base, new = str(place / "base"), str(place / f"new-{self._number}")
        run = str(place / self._random.choice(["zeroth", "lora"]))
        match name:
            case "plan":
                return {"model": base, "output": new}
            case "train":
                return {"model": base, "output": new, "steps": "2", "batch_size": "2"}
            case "tune":  # which refuses what each trial has
                return {
                    "model": base,
                    "output": new,
                    "forwards": "200",
                    "learning_rates": "1e-4 1e-3",
                    "batch_size": "2",
                }
            case "init":
                return {"model": base, "data": self._rows(), "output": f"{new}.yaml"}
            case "evaluate":
                return {"run_directory": run, "data": self._rows(RowFormat.TEXT)}
            case "generate":
                return {"run_directory": run, "prompt": "'the cat'", "max_new_tokens": "2"}
            case "chat":
                return {"run_directory": run, "max_new_tokens": "2"}
            case "export":
                return {"run_directory": run, "output": new}
            case "merge":
                return {"run_directory": str(place / "lora"), "output": new}
            case "verify":
                return {"model": base, "steps": "1", "tokens": "4", "batch_size": "2"}
            case "journal":
                return {"run_directory": run}
            case "report":
                return {"runs": run, "output": f"{new}.html"}
            case "rows":
                return {
                    "task": "sst2",
                    "data": str(place / "sst2"),
                    "output": new,
                    "train_rows": "8",
                }
        if self._random.random() < 0.5:
            return {"model": base, "output": new, "quantize": "int8"}
        return {"model": str(place / "pickled"), "output": new, "quantize": "None"}

    def _rows(self, rows: RowFormat | None = None) -> str:
        chosen = self._random.choice(list(ROWS)) if rows is None else rows
        return str(self._place / f"{chosen.name}.jsonl")

    def _of_run(self, listed: Mapping[str, OptionField]) -> dict[str, Any]:
        """Method, rows and objective of a run, which decide about its other options."""
        method: MethodName = self._random.choice(get_args(MethodName))
        rows = self._random.choice(list(ROWS))
        values: dict[str, Any] = {"method": method, "rows": rows}
        optimizer = optimizer_of(method)
        if optimizer is not None and method != "lora":
            values["lr"] = "1e-3"
        if method == BOTH:
            values["base_lr"] = "1e-3"
        if ADAPTER_EFFECT.applies(method, trains_adapter=True) and self._random.random() < 0.3:
            adapter = self._random.choice(ADAPTERS)
            values[adapter] = self._draw(listed[adapter])
        objectives = [
            task.name
            for task in TASKS
            if task.takes(rows) and (optimizer is None or task.has_gradient)
            if task.name not in (FUNCTION, REWARD)
        ]
        if self._random.random() < 0.5:
            values["objective"] = self._random.choice(objectives)
        return values

    def _add(
        self, one: OptionField, values: dict[str, Any], listed: Mapping[str, OptionField]
    ) -> None:
        """Draw a value of an option, and what it needs, if it may stand beside the others."""
        drawn = self._draw(one)
        if drawn is None or one.field in values or not self._fits(one, values, listed):
            return
        needs = one.option.needs if one.option is not None else ()
        met = {**self._defaults(listed), **values}
        if needs and not any(is_met(need, met, values) for need in needs):
            name, _, value = self._random.choice(needs).partition("=")
            needed = listed[name]
            if name in values or not self._fits(needed, values, listed):
                return
            if value:
                values[name] = value
            else:
                self._add(needed, values, listed)
            if name not in values:
                return
        values[one.field] = drawn

    @staticmethod
    def _defaults(listed: Mapping[str, OptionField]) -> dict[str, Any]:
        return {name: plain(one.default) for name, one in listed.items()}

    def _fits(
        self, one: OptionField, values: Mapping[str, Any], listed: Mapping[str, OptionField]
    ) -> bool:
        """Whether an option may stand beside those that were drawn, by what is declared of each."""
        if one.option is None:
            return True
        method = values.get("method")
        trains_adapter = bool({*ADAPTERS} & values.keys()) or method in ("lora", BOTH)
        excluded = {
            other
            for name in values
            if (option := listed[name].option if name in listed else None) is not None
            for other in option.excludes
        }
        task = None
        if "rows" in values:
            objective = REWARD if one.field == "reward" else values.get("objective", AUTO)
            task = find_task(objective, values["rows"])
            if not task.takes(values["rows"]):
                return False
        is_of_others = any(one.field in other.options for other in TASKS)
        return (
            (method is None or one.option.effect.applies(method, trains_adapter=trains_adapter))
            and not (one.option.excludes.keys() & values.keys() or one.field in excluded)
            and (task is None or not is_of_others or one.field in task.options)
        )

    def _draw(self, one: OptionField) -> Any:
        """A value of an option within its range; None: there is none to draw."""
        if one.field in TEXTS:
            return self._random.choice(TEXTS[one.field])
        if one.type is bool:
            return self._random.random() < 0.5
        names = [] if one.field == "lr" else list(one.named)  # of which auto is for train
        kinds = {*one.kinds} & {int, float}
        if names and (not kinds or self._random.random() < 0.5):
            return self._random.choice(names)
        if not kinds:
            return None
        range_of = limits(one.option)
        if int in kinds:
            least = max(range_of.get("least", 1), 1)
            return self._random.randint(least, min(range_of.get("most", least), least) + MOST_ABOVE)
        above = max(range_of.get("above", 0), range_of.get("least", 0), 0)
        below = min(range_of.get("below", 1), range_of.get("most", 1), 1)
        return round(above + (below - above) * self._random.uniform(0.01, 0.5), 6)

    def _written(self, one: OptionField, value: Any) -> list[str]:
        if one.type is bool:
            return [one.flag if value else one.flag.replace("--", "--no-", 1)]
        if not isinstance(value, str):
            return [one.flag, str(value)]
        text = value.format(self._place, self._place, number=self._number)
        return [one.flag, *(text.split() if one.items else [text])]


def _is_of_start(one: OptionField) -> bool:
    """Whether an option says how a run's model is opened, which is fixed at the run's start, or
    needs another model than that of the walk.
    """
    if one.field in ("model", "journal", "format", "ollama", "gguf_type", "as_adapter"):
        return True
    return one.option is not None and one.option.section == "model"


def limits(option: Option | None) -> Mapping[str, Any]:
    """The range that is declared of an option."""
    return getattr(option.check, "keywords", {}) if option is not None else {}


def make_place(folder: Path) -> Path:
    """Lay a model, rows and two runs into a folder."""
    config = small_config("llama")
    torch.manual_seed(0)
    small_model(config).save_pretrained(folder / "base")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast  # its constructor is untyped
    saved = fast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    saved.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    saved.save_pretrained(folder / "base")
    for rows, values in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in values)
        (folder / f"{rows.name}.jsonl").write_text(text)
    shutil.copytree(folder / "base", folder / "pickled")
    weights = folder / "pickled" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    (folder / "sst2").mkdir()
    for split in ("train", "validation"):
        rows_of = [{"sentence": f"the {word}", "label": i % 2} for i, word in enumerate(WORDS[4:])]
        text = "".join(json.dumps(row) + "\n" for row in rows_of)
        (folder / "sst2" / f"{split}.jsonl").write_text(text)
    data = ("--model", folder / "base", "--data", folder / "TEXT.jsonl", "--batch-size", 2)
    for name, words in (("zeroth", ["--method", "zeroth-order"]), ("lora", ["--lora-rank", 2])):
        made = run(["train", *map(str, (*data, *words, "--steps", 2, "--output", folder / name))])
        assert made.status == "ran", made.said
    return folder


def run(line: Sequence[str]) -> Ended:
    """Run a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    status, said = "ran", ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(line))
        except SystemExit as end:
            told = [text for text in err.getvalue().splitlines() if text.startswith("zo2: ")]
            is_refused = end.code == REFUSED and len(told) == 1
            status = "refused" if is_refused else "fault"
            said = told[0] if is_refused else out.getvalue() + err.getvalue()
        except Exception:
            status, said = "fault", traceback.format_exc()
    if "Traceback" in err.getvalue():
        status, said = "fault", err.getvalue()
    return Ended(shlex.join(line), status, said)


def walk(
    place: Path, lines: int, seed: int, weights: Mapping[str, int] = WEIGHTS
) -> Iterator[Ended]:
    """Draw so many lines and run each."""
    drawn = Walk(place, seed, weights)
    for _ in range(lines):
        line = drawn.line()
        with mock.patch("sys.stdin", io.StringIO("the cat\n")):
            yield run(line)
        for made in place.glob("new-*"):
            shutil.rmtree(made) if made.is_dir() else made.unlink()


def main_of_tool(lines: int = 300, seed: int = 0, output: Path | None = None) -> None:
    """Walk, and print how the lines ended."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() as folder:
        ended = list(walk(make_place(Path(folder)), lines, seed))
    counts = Counter((name, one.status) for one in ended for name in (one.line.split()[0], "all"))
    print(f"{'command':<12}" + "".join(f"{status:>12}" for status in STATUSES))
    for name in [*WEIGHTS, "all"]:
        print(f"{name:<12}" + "".join(f"{counts[name, status]:>12}" for status in STATUSES))
    result = {
        "lines": lines,
        "seed": seed,
        **{status: counts["all", status] for status in STATUSES},
        "ended": [one._asdict() for one in ended if one.status != "ran"],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if output is not None:
        output.write_text(f"{text}\n")


if __name__ == "__main__":
    command(main_of_tool)()
