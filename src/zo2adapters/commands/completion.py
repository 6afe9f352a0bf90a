"""Completion of command lines by the shell: commands, options, and the values of an option that have names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from zo2adapters.commands.option_fields import option_fields


def completions(line: str, commands: Iterable[str], options_of: Callable[[str], Any]) -> list[str]:
    """What the last word of a command line can become; nothing where it can be any text, such as a path.

    Args:
        line: The command line up to the cursor, the program's name first.
        commands: The names of the commands.
        options_of: Returns the options of a command.
    """
    *words, last = f"{line}.".split()  # the dot keeps an empty last word
    last = last[:-1]
    if len(words) == 1:
        return [name for name in commands if name.startswith(last)]
    if not words or words[1] not in commands:
        return []
    listed = list(option_fields(options_of(words[1])))
    if last.startswith("-"):
        offered = [flag for option in listed for flag in option.flags]
    else:
        offered = [name for option in listed if words[-1] in option.flags for name in option.named]
    return [text for text in offered if text.startswith(last)]
