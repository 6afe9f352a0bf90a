"""Apply a tokenizer's chat template under limits of time and memory.

A template comes with a model and is a program: nested loops may never end, and ``'x' * 10**10`` exhausts memory. Jinja's
sandbox protects files and functions, not time and memory, so a limited child process renders with transformers' own code.
"""

from __future__ import annotations

import atexit
import json
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from zo2adapters.limited_process import LimitedProcess, LimitedProcessError
from zo2core.errors import DataError

SECONDS = 5.0  # CPU seconds for one conversation; templates take milliseconds
_MEMORY = 1 << 28  # bytes that the child may allocate after its start
_LONGEST = 1 << 20  # characters of a rendered text, in addition to those for the messages
_LONGEST_PER_CHARACTER = 16  # additional characters for each character of the messages


def render_chat(
    messages: list[Any], tokenizer: PreTrainedTokenizerBase, *, reply_follows: bool = False, rendered_at: str | None = None
) -> str:
    """Render messages as ``tokenizer.apply_chat_template`` does."""
    try:
        plain = json.dumps(messages)
        request = {
            "messages": plain,
            "template": tokenizer.get_chat_template(),
            "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "reply_follows": reply_follows,
            "rendered_at": rendered_at,
            "longest": _LONGEST + _LONGEST_PER_CHARACTER * len(plain),
        }
        return str(_renderer().ask(request, seconds=SECONDS, memory=_MEMORY))
    except (LimitedProcessError, ValueError, RecursionError) as error:
        found = f"messages that the chat template refuses ({error})"
        raise DataError(
            "row", found=found, expected="messages that it can render", remedy="check their roles, and the template"
        ) from error


def is_dated(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's chat template writes the date or the time."""
    return "strftime_now" in json.dumps(tokenizer.chat_template)


@cache
def _renderer() -> LimitedProcess:
    """The child process that renders for this process. It is kept, because starting it takes a second or two."""
    process = LimitedProcess(Path(__file__).with_name("template_rendering.py"))
    atexit.register(process.close)
    return process
