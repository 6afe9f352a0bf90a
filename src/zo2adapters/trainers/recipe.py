"""Recipes: the options of a run as a YAML file, a line an option, and what of a run's options may
change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from zo2adapters.tasks.option_tree import (
    SECTIONS,
    Change,
    Option,
    Section,
    as_written,
    declared,
    filled,
    flat,
    is_met,
    leaves,
)
from zo2adapters.trainers.options import TrainOptions
from zo2core.errors import OptionError, system_error
from zo2core.io.durable import open_regular

OptionsT = TypeVar("OptionsT")
_OF_RUNS = [(one, one.option) for one in declared(TrainOptions) if one.option is not None]
# of a run, by name, in the order of recipes: by sections, each of which begins with the option that
# is called as it
OPTIONS: Mapping[str, Option] = {
    one.name: option
    for one, option in sorted(
        _OF_RUNS,
        key=lambda pair: (SECTIONS.index(pair[1].section), pair[0].name != pair[1].section),
    )
}


def changed(saved: OptionsT, given: object, change: Change) -> OptionsT:
    """A run's options, with those of one kind as a command gives them; files that neither has stay
    as they are.
    """
    before, now = (
        {name: value for name, value, _ in leaves(options)} for options in (saved, given)
    )
    names = [
        name
        for name in before
        if name in now and name in OPTIONS and OPTIONS[name].change is change
    ]
    if change is Change.MOVED:
        names = [name for name in names if None not in (before[name], now[name])]
    options: OptionsT = filled(saved, {name: now[name] for name in names})
    return options


def require_unchanged(
    saved: Mapping[str, Any], given: Mapping[str, Any], *changes: Change, remedy: str
) -> None:
    """Refuse options that differ from a run's and may not change."""
    now = flat(given)
    for name, before in flat(saved).items():
        if name in OPTIONS and OPTIONS[name].change not in changes and now[name] != before:
            expected = f"{as_written(before)}, as in the run, whose result depends on it"
            raise OptionError(name, as_written(now[name]), expected, f"leave it out, {remedy}")


def used_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as JSON by name, without those that have no effect on a run."""
    values = flat(options)
    method: Any = values.get("method")
    trains_adapter = any(values.get(name) is not None for name in ("adapter", "lora_rank"))

    # by values, not by methods
    chosen = values.get("rank") is not None and values.get("write_back_every") != "never"
    idle = {"write_back_every": chosen}
    there = {name for name, value in values.items() if value not in (None, False, [])}

    def is_used(name: str) -> bool:
        row = OPTIONS.get(name)
        if row is None or name == "method":
            return True
        if idle.get(name, False):
            return False
        is_alone = bool(row.needs) and not any(is_met(one, values, there) for one in row.needs)
        return not is_alone and row.effect.applies(method, trains_adapter=trains_adapter)

    return {name: value for name, value in values.items() if is_used(name)}


RECIPE = "recipe.yaml"  # name of a run's own recipe in its directory

_HEAD = "# All options of this run. To repeat it: zo2 train recipe.yaml --output DIR\n"
_LARGEST_RECIPE = 1 << 20  # bytes


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which leaves texts as they are written and refuses a key that occurs
    twice.

    YAML 1.1 would read no and on as bools, 1:30 as 90, 010 as 8 and dates as such. Here true and
    false alone are bools, as in YAML 1.2, and numbers stay texts, which the command line reads.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML declares it
        first: [(tag, form) for tag, form in known if tag.endswith((":null", ":merge"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        """See PyYAML."""
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} twice", key_node.start_mark
                )
            keys |= {key} if isinstance(key, Hashable) else set()
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")
)


def recipe_text(options: TrainOptions, branch: Mapping[str, Any] | None = None) -> str:
    """The recipe that repeats a run."""
    values = {
        **used_options(options.to_json()),
        "output": str(options.output.resolve()),
        **(branch or {}),
    }
    order = [*OPTIONS, *(branch or {})]  # not the steps of its schedule, which are no option
    written = {name: values[name] for name in order if values.get(name) is not None}
    text = _HEAD
    for section in SECTIONS:
        of_section = {
            name: value for name, value in written.items() if _section_of(name) == section
        }
        text += (
            "\n# "
            f"{section}\n"
            f"{yaml.safe_dump(of_section, sort_keys=False, allow_unicode=True, width=1000)}"
        )
    return text


def _section_of(name: str) -> Section:
    """The section of an option; those of the command alone are about its output."""
    return OPTIONS[name].section if name in OPTIONS else "output"


def yaml_kind(value: object) -> str:
    """What a value of a recipe is called in YAML."""
    kinds: list[tuple[type, str]] = [(dict, "a mapping"), (list, "a list"), (str, "a text")]
    return next((name for kind, name in kinds if isinstance(value, kind)), "a number")


def read_recipe(path: str | os.PathLike[str]) -> dict[object, object]:
    """Read a recipe's keys and values as YAML gives them."""
    expected, remedy = (
        "a YAML file with a line such as steps: 100 for each option",
        "correct the file",
    )
    try:
        with open_regular(path) as file:
            content = file.read(_LARGEST_RECIPE + 1)
        if len(content) > _LARGEST_RECIPE:
            raise OptionError(Path(path), "more than 1 MiB", expected, "pass another file")
        values = yaml.load(content, _Loader)  # noqa: S506 - a safe loader
    except OSError as error:
        remedy = "check the path; zo2 init writes a recipe"
        raise system_error(
            OptionError, Path(path), error, expected=expected, remedy=remedy
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Path(path) if mark is None else f"{path}, line {mark.line + 1}"
        # The parser's text may begin with 'found' or 'expected'.
        found = "no YAML" if error.problem is None else f"no YAML ({error.problem})"
        raise OptionError(where, found, expected, remedy) from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise OptionError(Path(path), found, expected, remedy) from error
    if not isinstance(values, dict):
        raise OptionError(
            Path(path),
            "nothing" if values is None else yaml_kind(values),
            expected,
            remedy,
        )
    return values
