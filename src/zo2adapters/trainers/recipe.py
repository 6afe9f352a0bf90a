"""Recipes: the options of ``zo2 train`` as a YAML file, one line an option."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from zo2adapters.trainers.option_table import OPTIONS, SECTIONS, by_option, section_of, used_options
from zo2adapters.trainers.options import TrainOptions
from zo2core.errors import OptionError, reason
from zo2core.io.durable import open_regular

RECIPE = "recipe.yaml"  # name of a run's own recipe in its directory

_HEAD = "# All options of this run. To repeat it: zo2 train recipe.yaml --output DIR\n"
_LARGEST = 1 << 20  # bytes


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which leaves texts as they are written and refuses a key that occurs twice.

    YAML 1.1 would read no and on as bools, 1:30 as 90, 010 as 8 and dates as such. Here true and false alone are bools, as
    in YAML 1.2, and numbers stay texts, which the command line reads.
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
                raise yaml.constructor.ConstructorError(None, None, f"the key {key} a second time", key_node.start_mark)
            keys |= {key} if isinstance(key, Hashable) else set()
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF"))


def recipe_text(options: TrainOptions, branch: Mapping[str, Any] | None = None) -> str:
    """The recipe that repeats a run."""
    values: dict[str, Any] = {}
    for name, value in used_options(options.to_json()).items():
        values |= value if isinstance(value, dict) else {name: value}
    del values["schedule_steps"]  # a lengthened run has a constant rate, which depends on no number of steps
    values |= {"output": str(options.output.resolve()), **(branch or {})}
    written = by_option({name: values.get(name) for name in OPTIONS})
    text = _HEAD
    for section in SECTIONS:
        of_section = {name: value for name, value in written.items() if section_of(name) == section}
        text += f"\n# {section}\n{yaml.safe_dump(of_section, sort_keys=False, allow_unicode=True, width=1000)}"
    return text


def read_recipe(path: str | os.PathLike[str]) -> dict[object, object]:
    """Read a recipe's keys and values as YAML gives them."""
    expected, remedy = "a YAML file with a line such as steps: 100 for each option", "correct the file"
    try:
        with open_regular(path) as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise OptionError(Path(path), found="more than 1 MiB", expected=expected, remedy="pass another file")
        values = yaml.load(content, _Loader)  # noqa: S506 - a safe loader
    except OSError as error:
        raise OptionError(Path(path), found=reason(error), expected=expected, remedy="check the path") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Path(path) if mark is None else f"{path}, line {mark.line + 1}"
        raise OptionError(where, found=error.problem or "no YAML", expected=expected, remedy=remedy) from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise OptionError(Path(path), found=found, expected=expected, remedy=remedy) from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        raise OptionError(Path(path), found=found, expected=expected, remedy=remedy)
    return values
