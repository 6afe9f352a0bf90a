"""Templates of prompts in the language of ollama's Modelfiles, for what a model was trained on."""

from __future__ import annotations

from collections.abc import Callable
from string import Formatter

from transformers import PreTrainedTokenizerBase

from zo2adapters.tasks.chat_template import render_chat
from zo2adapters.tasks.row_options import RowOptions, with_line_breaks
from zo2core.errors import DataError

_SYSTEM, _PROMPT, _RESPONSE, _NEXT = "\ue001", "\ue002", "\ue003", "\ue004"  # stand for texts; no template has them


def template_of_rows(rows: RowOptions) -> str | None:
    """The template of a run's prompts; None if a prompt is not one column between fixed texts."""
    if rows.prompt_template is None or len(rows.prompt_columns) != 1:
        return None
    parts = list(Formatter().parse(with_line_breaks(rows.prompt_template)))
    text = "".join(text + ("" if column is None else _PROMPT) for text, column, _, _ in parts)
    return None if text.count(_PROMPT) != 1 or "{{" in text else text.replace(_PROMPT, "{{ .Prompt }}")


def template_of_chats(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The template of a chat model's turns; None for chats that are no fixed texts between the messages.

    Its parts are those of rendered chats, and two other chats have to be rendered alike.
    """
    if not tokenizer.chat_template:
        return None

    def rendered(*texts: str, system: str | None = None) -> str:
        roles = ("user", "assistant") * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        messages = messages if system is None else [{"role": "system", "content": system}, *messages]
        text = render_chat(messages, tokenizer, reply_follows=True)
        return text.removeprefix(tokenizer.bos_token or "")  # which ollama puts there itself

    try:
        chat, alone = rendered(_PROMPT, _RESPONSE, _NEXT), rendered(_PROMPT)
        before, _, asked = alone.partition(_PROMPT)
        answered = chat.partition(_RESPONSE)[2].partition(_NEXT)[0].removesuffix(before)
        turns = [f"{before}{user}{asked}{reply}{answered}" for user, reply in ("ab", "cd")]
        same = [rendered("a", "b", "c", "d", "e") == f"{''.join(turns)}{before}e{asked}"]
        system = rendered(_PROMPT, system=_SYSTEM).partition(_PROMPT)[0] if _takes_system(rendered) else ""
        led, _, after = system.partition(_SYSTEM)
        same.append(not system or rendered("a", "b", "c", system="s") == f"{led}s{after}a{asked}b{answered}{before}c{asked}")
    except DataError:
        return None
    if not all(same) or "{{" in f"{system}{before}{asked}{answered}":
        return None
    begin = f"{{{{ if .System }}}}{led}{{{{ .System }}}}{after}{{{{ else }}}}{before}{{{{ end }}}}" if system else before
    return f"{begin}{{{{ .Prompt }}}}{asked}{{{{ .Response }}}}{answered}"


def _takes_system(rendered: Callable[..., str]) -> bool:
    """Whether a chat may begin with a system message."""
    try:
        return _SYSTEM in rendered(_PROMPT, system=_SYSTEM)
    except DataError:
        return False
