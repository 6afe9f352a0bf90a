"""A model directory's tokenizer, and its chat template, rendered under limits of time and memory or
written for ollama.

Note: why a process renders. A template comes with a model and is a program: nested loops may never
end, and ``'x' * 10**10`` exhausts memory. Jinja's sandbox protects files and functions, not time
and memory, so a limited child process renders with transformers' own code.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from zo2adapters.limited_process import LimitedProcess, LimitedProcessError
from zo2adapters.models.checkpoint import companion_files
from zo2adapters.models.gguf_model import gguf_tokenizer
from zo2adapters.models.model_files import is_gguf, require_tokenizer, unusable_tokenizer
from zo2adapters.tasks.limited_backend import limit
from zo2adapters.tasks.row_options import RowOptions, with_line_breaks
from zo2adapters.tasks.row_source import row_error
from zo2adapters.tasks.tokenizer_files import require_loadable
from zo2adapters.tasks.tokenizer_growth import Growth
from zo2core import ZO2Error
from zo2core.errors import DataError

SECONDS = 5.0  # CPU seconds for one conversation; templates take milliseconds
_MEMORY = 1 << 28  # bytes that the child may allocate after its start
_LONGEST = 1 << 20  # characters of a rendered text, in addition to those for the messages
_LONGEST_PER_CHARACTER = 16  # additional characters for each character of the messages
# stand for texts; no template has them
_SYSTEM = "\ue001"
_PROMPT = "\ue002"
_RESPONSE = "\ue003"
_NEXT = "\ue004"


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory or of a GGUF file, without running remote code.

    It works under limits of time and memory. See ``limited_backend``.
    """
    growth: Growth | None = None
    if not is_gguf(directory):
        _require_name_in_utf8(directory)
        companion_files(directory)  # refuses links that lead out of the directory
        require_tokenizer(directory)  # transformers' own errors mislead
        for path in directory.iterdir():
            if path.exists() and not (path.is_file() or path.is_dir()):  # reading a pipe would hang
                raise unusable_tokenizer(directory, f"{path.name} is not a regular file")
        growth = require_loadable(directory)
    try:
        tokenizer: Any = (
            gguf_tokenizer(directory)
            if is_gguf(directory)
            else AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        )
    except (KeyboardInterrupt, SystemExit, ZO2Error):
        raise
    # A damaged tokenizer.json may raise anything: a panic of the Rust library is not even an
    # Exception.
    except BaseException as error:
        raise unusable_tokenizer(
            directory, (str(error).splitlines() or [type(error).__name__])[0][:200]
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise unusable_tokenizer(directory, f"a {type(tokenizer).__name__}")
    limit(tokenizer, growth)
    return tokenizer


def _require_name_in_utf8(directory: Path) -> None:
    """Refuse a path that the library of tokenizers, which writes every path in UTF-8, would not
    find.
    """
    name = str(directory)
    if name.encode(errors="replace") != os.fsencode(directory):
        raise DataError(
            directory,
            f"a path that is not UTF-8, where names of files are in {sys.getfilesystemencoding()}",
            "a path in UTF-8, by which tokenizers are opened",
            "set PYTHONUTF8=1 or the locale C.UTF-8, or rename the directory",
        )


def vocabulary_of(config: PretrainedConfig) -> int | None:
    """Rows of a model's embedding; None if its config does not say."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token id for padding: the tokenizer's padding token, else its EOS, else 0."""
    return next(
        (
            token
            for token in (tokenizer.pad_token_id, tokenizer.eos_token_id)
            if isinstance(token, int)
        ),
        0,
    )


def render_chat(
    messages: list[Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    reply_follows: bool = False,
    rendered_at: str | None = None,
) -> str:
    """Render messages as ``tokenizer.apply_chat_template`` does."""
    try:
        plain = json.dumps(messages)
        request = {
            "messages": plain,
            "template": tokenizer.get_chat_template(),
            "special_tokens": {
                name: str(token) for name, token in tokenizer.special_tokens_map.items()
            },
            "reply_follows": reply_follows,
            "rendered_at": rendered_at,
            "longest": _LONGEST + _LONGEST_PER_CHARACTER * len(plain),
        }
        return str(_renderer().ask(request, seconds=SECONDS, memory=_MEMORY))
    except (LimitedProcessError, ValueError, RecursionError) as error:
        found = f"messages that the chat template refuses ({error})"
        expected = "messages that it can render"
        raise row_error(found, expected, "check their roles, and the template") from error


def is_dated(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's chat template writes the date or the time."""
    return "strftime_now" in json.dumps(tokenizer.chat_template)


@cache
def _renderer() -> LimitedProcess:
    """The child process that renders for this process.

    It is kept, because starting it takes a second or two.
    """
    process = LimitedProcess(Path(__file__).with_name("template_rendering.py"))
    atexit.register(process.close)
    return process


def template_of_rows(rows: RowOptions) -> str | None:
    """The template of a run's prompts for ollama; None if a prompt is not one column between fixed
    texts.
    """
    if rows.prompt_template is None or len(rows.prompt_columns) != 1:
        return None
    parts = list(Formatter().parse(with_line_breaks(rows.prompt_template)))
    text = "".join(text + ("" if column is None else _PROMPT) for text, column, _, _ in parts)
    return (
        None if text.count(_PROMPT) != 1 or "{{" in text else text.replace(_PROMPT, "{{ .Prompt }}")
    )


def template_of_chats(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The template of a chat model's turns for ollama; None for chats that are no fixed texts
    between the messages.

    Its parts are those of rendered chats, and two other chats have to be rendered alike.
    """
    if not tokenizer.chat_template:
        return None

    def rendered(*texts: str, system: str | None = None) -> str:
        roles = ("user", "assistant") * len(texts)
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ]
        messages = (
            messages if system is None else [{"role": "system", "content": system}, *messages]
        )
        text = render_chat(messages, tokenizer, reply_follows=True)
        return text.removeprefix(tokenizer.bos_token or "")  # which ollama puts there itself

    try:
        chat = rendered(_PROMPT, _RESPONSE, _NEXT)
        alone = rendered(_PROMPT)
        before, _, asked = alone.partition(_PROMPT)
        answered = chat.partition(_RESPONSE)[2].partition(_NEXT)[0].removesuffix(before)
        turns = [f"{before}{user}{asked}{reply}{answered}" for user, reply in ("ab", "cd")]
        same = [rendered("a", "b", "c", "d", "e") == f"{''.join(turns)}{before}e{asked}"]
        system = (
            rendered(_PROMPT, system=_SYSTEM).partition(_PROMPT)[0]
            if _takes_system(rendered)
            else ""
        )
        led, _, after = system.partition(_SYSTEM)
        same.append(
            not system
            or rendered("a", "b", "c", system="s")
            == f"{led}s{after}a{asked}b{answered}{before}c{asked}"
        )
    except DataError:
        return None
    if not all(same) or "{{" in f"{system}{before}{asked}{answered}":
        return None
    begin = (
        f"{{{{ if .System }}}}{led}{{{{ .System }}}}{after}{{{{ else }}}}{before}{{{{ end }}}}"
        if system
        else before
    )
    return f"{begin}{{{{ .Prompt }}}}{asked}{{{{ .Response }}}}{answered}"


def _takes_system(rendered: Callable[..., str]) -> bool:
    """Whether a chat may begin with a system message."""
    try:
        return _SYSTEM in rendered(_PROMPT, system=_SYSTEM)
    except DataError:
        return False
