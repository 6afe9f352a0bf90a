"""A new option is one declaration and one use: with the diff of docs/library.md it is in every
place that has options.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from profiles import LONG

ROOT = Path(__file__).parent.parent.parent

COMMANDS = """
from pathlib import Path
import options_page
from zo2adapters.cli import command_class, COMMANDS
from zo2adapters.commands.options import command_help, completions, parse_command
from zo2adapters.commands.train import Plan, Train, Tune, values_of_recipe
from zo2adapters.tasks.option_tree import Change
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.recipe import recipe_text, require_unchanged
from zo2core.errors import OptionError
import zo2adapters

assert COPY in zo2adapters.__file__


def refused(work):
    try:
        work()
    except OptionError as error:
        return str(error)


words = "--model base --data rows.jsonl --output run --method zeroth-order".split()
given = parse_command("train", Train, [*words, "--eps-factor", "0.5"])
options = given.options
options.require_valid(given=given.given)
told = " ".join(command_help("train", Train, lists_all=True).split())
assert "--eps-factor FLOAT" in told
assert "Factor of the perturbation scale, in all evaluations of a step. (default: 1.0)" in told
for name in ("plan", "tune"):
    assert "--eps-factor" in command_help(name, command_class(name), lists_all=True)
assert completions("zo2 train --eps-f", COMMANDS, command_class) == ["--eps-factor"]
assert "| `--eps-factor FLOAT` | Factor of the perturbation scale" in options_page.page()

above = lambda: parse_command("train", Train, [*words, "--eps-factor", "0"]).options.require_valid()
assert refused(above).startswith("eps_factor: found 0.0; expected a finite number above 0")
other = [*words, "--method", "lora", "--eps-factor", "2"]
assert "eps_factor: found 2.0 with --method lora" in refused(
    lambda: parse_command("train", Train, other).options.require_valid()
)

text = recipe_text(options)
assert "eps_factor: 0.5" in text
Path("recipe.yaml").write_text(text)
assert values_of_recipe(Path("recipe.yaml"))["eps_factor"] == 0.5
assert "did you mean eps_factor" in refused(lambda: values_of_recipe({"eps_facto": 1}))
assert "expected it in the section method" in refused(
    lambda: values_of_recipe({"data": {"eps_factor": 1}})
)
saved = options.to_json()
assert TrainOptions.from_json(saved, Path("run")).to_json() == saved
changed = options.having(eps_factor=0.25).to_json()
resumed = lambda: require_unchanged(saved, changed, Change.RESUME, remedy="or branch")
assert refused(resumed).startswith("eps_factor: found 0.25; expected 0.5, as in the run")
require_unchanged(saved, changed, Change.RESUME, Change.BRANCH, remedy="")

# its use
assert options.optimization.estimator_of(lambda step: 1e-3, 0.0).estimator.zo_eps == 0.5e-3
"""

FRAMEWORKS = """
from transformers import HfArgumentParser
from zo2adapters import LightningArguments, StreamedArguments
from zo2core.errors import OptionError

given = ["--method", "zeroth-order", "--eps_factor", "0.5"]
[streamed] = HfArgumentParser(StreamedArguments).parse_args_into_dataclasses(given)
module = LightningArguments(method="zeroth-order", eps_factor=0.5)
for arguments in (streamed, module):
    assert arguments.eps_factor == 0.5
    assert "eps_factor: Factor of the perturbation scale" in type(arguments).__doc__
    assert arguments.estimator_of(lambda step: 1e-3, 0.0).estimator.zo_eps == 0.5e-3
for wrong in ({"eps_factor": 0.0}, {"method": "lora", "eps_factor": 2.0}):
    try:
        StreamedArguments(**{"method": "zeroth-order", **wrong})
    except OptionError as error:
        assert error.where == "eps_factor"
    else:
        raise AssertionError(wrong)
"""


def apply(diff: str, folder: Path) -> None:
    """Apply a diff, whose lines are looked for where no numbers are given."""
    path = folder / diff.splitlines()[1].removeprefix("+++ b/src/")
    text = path.read_text()
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path.write_text(text)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src" / "zo2adapters", folder / "zo2adapters")
    page = (ROOT / "docs" / "library.md").read_text()
    [diff] = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    added = [line for line in diff.splitlines() if line.startswith("+") and line[:3] != "+++"]
    assert len(added) == 3, "a declaration with its text, and a use"
    apply(diff, folder)
    return folder


@pytest.mark.parametrize(
    "program",
    [pytest.param(COMMANDS, id="commands"), pytest.param(FRAMEWORKS, id="frameworks", marks=LONG)],
)
def test_a_new_option_is_one_declaration_and_one_use(program: str, copy: Path) -> None:
    paths = [str(copy), str(ROOT / "src"), str(ROOT / "tools")]
    subprocess.run(
        [sys.executable, "-c", f"COPY = {str(copy)!r}\n{program}"],
        check=True,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
