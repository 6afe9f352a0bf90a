"""The page of options, docs/options.md, made from the tree of options of `zo2 train`.

python tools/options_page.py     write the page
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from zo2adapters.commands.options import OptionField, documentation, option_fields
from zo2adapters.commands.train import Train
from zo2adapters.tasks.option_tree import ANY, SECTIONS, Change, plain

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
_HEAD = (
    "# Options of zo2 train\n\n"
    "This page lists the options of `zo2 train` and the keys of recipes, by section. `zo2 train "
    "--help-all` says more about\neach. It is made from the code by `python "
    "tools/options_page.py`.\n\n"
    "*Changes* says when an option of a run may change: in a branch (`--from-step`), at a resume "
    "and in a branch, only as\nthe new path of a file that moved, or never. *With* says with which "
    "methods it has an effect; elsewhere it is refused.\n"
)
_CHANGES = {
    Change.NEVER: "never",
    Change.BRANCH: "branch",
    Change.RESUME: "resume",
    Change.MOVED: "moved",
    Change.CALL: "not saved",
}


def page() -> str:
    """The page as Markdown."""
    return _HEAD + "".join(_section(section) for section in SECTIONS)


def _section(section: str) -> str:
    first = Train.first_options.split()
    of_section = [
        one
        for one in option_fields(Train)
        if one.option is not None and one.option.section == section
    ]
    of_section.sort(key=lambda one: first.index(one.field) if one.field in first else len(first))
    rows = "".join(f"| {' | '.join(_cells(one))} |\n" for one in of_section)
    head = "| option | | default | changes | with |\n|---|---|---|---|---|\n"
    return f"\n## {section.capitalize()}\n\n{head}{rows}"


def _cells(one: OptionField) -> Iterator[str]:
    assert one.option is not None, "it has a section"
    value = "" if one.type is bool else f" {one.kind}".replace("|", "\\|")
    yield f"`{one.flag}{value}`"
    first, _, _ = inspect.cleandoc(documentation(one)).replace("\n", " ").partition(". ")
    yield first.rstrip(".").replace("|", "\\|")
    default = plain(one.default)
    yield "" if default in (None, [], False) else f"`{'on' if default is True else default}`"
    yield _CHANGES[one.option.change]
    yield "" if one.option.effect is ANY else one.option.effect.needs


if __name__ == "__main__":
    PAGE.write_text(page())
