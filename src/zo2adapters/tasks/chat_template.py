"""A tokenizer's chat template, applied under limits.

A template comes with a model and is a program: loops in loops run for ever, and ``'x' * 10**10`` takes any memory. Jinja's
sandbox keeps it from files and functions, not from either. So a child process renders, with transformers' own code.
"""

from __future__ import annotations

import atexit
import json
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from zo2adapters.limited_process import LimitedProcess, LimitedProcessError
from zo2core import DataError

SECONDS = 5.0  # of computing for one conversation; templates take milliseconds
_MEMORY = 1 << 28  # bytes beside what the child has once it is started
_LONGEST = 1 << 20  # characters, beside those for what the messages hold
_LONGEST_PER_CHARACTER = 16


def render_chat(messages: list[Any], tokenizer: PreTrainedTokenizerBase, *, reply_follows: bool = False) -> str:
    """Give the text that ``tokenizer.apply_chat_template`` would give.

    Args:
        messages: JSON objects.
        tokenizer: Has a chat template.
        reply_follows: Whether the text ends where the assistant's reply begins.

    Raises:
        DataError: about a row, if the template refuses the messages or exceeds its limits.
    """
    try:
        plain = json.dumps(messages)
        request = {
            "messages": plain,
            "template": tokenizer.get_chat_template(),
            "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "reply_follows": reply_follows,
            "longest": _LONGEST + _LONGEST_PER_CHARACTER * len(plain),
        }
        return str(_renderer().ask(request, seconds=SECONDS, memory=_MEMORY))
    except (LimitedProcessError, ValueError, RecursionError) as error:
        found = f"messages that the chat template refuses ({error})"
        raise DataError(
            "row", found=found, expected="messages it can render", remedy="check their roles and the template"
        ) from error


@cache
def _renderer() -> LimitedProcess:
    """The one child that renders for this process: its start takes a second or two, and the template is in each request."""
    process = LimitedProcess(Path(__file__).with_name("template_rendering.py"))
    atexit.register(process.close)
    return process
