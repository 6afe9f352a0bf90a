"""Templates of Modelfiles: what ollama renders by them is what the model was trained on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from models import save_tokenizer
from transformers import AutoTokenizer

from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.tasks.tokenizer import template_of_chats, template_of_rows

TURNS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
DEFAULT = "{% if messages[0].role != 'system' %}<|start|>system\nBe kind.<|end|>\n{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
COUNTED = "{{ messages | length }}"


def rendered(template: str, *turns: tuple[str, str], system: str = "") -> str:
    """What ollama makes of turns, whose last response is to come."""
    text = ""
    for number, (prompt, response) in enumerate(turns):
        values = {".System": system if number == 0 else "", ".Prompt": prompt, ".Response": response}

        def chosen(match: re.Match[str], values: dict[str, str] = values) -> str:
            return match[2] if values[match[1]] else match[3]

        turn = re.sub(r"{{ if (\.\w+) }}(.*?){{ else }}(.*?){{ end }}", chosen, template, flags=re.DOTALL)
        if number == len(turns) - 1:
            turn = turn.partition("{{ .Response }}")[0]
        text += re.sub(r"{{ (\.\w+) }}", lambda match, values=values: values[match[1]], turn)  # type: ignore[misc]
    return text


def chats(folder: Path, template: str) -> str | None:
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return template_of_chats(AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("extra", ["", NO_SYSTEM])
def test_turns_are_rendered_as_the_chat_template_does(extra: str, tmp_path: Path) -> None:
    template = chats(tmp_path, extra + TURNS + ASKED)
    assert template is not None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = [("one", "two"), ("three", "four"), ("five", "")]
    said = zip(("user", "assistant") * 3, [text for turn in turns for text in turn], strict=True)
    messages = [{"role": role, "content": text} for role, text in said][:-1]
    for system in ("", *([] if extra else ["terse"])):
        asked = [{"role": "system", "content": system}] * bool(system) + messages
        expected = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert rendered(template, *turns, system=system) == expected
    assert ("{{ .System }}" in template) == (not extra)


@pytest.mark.parametrize(
    "template", [DEFAULT + TURNS + ASKED, COUNTED + TURNS + ASKED, "{{ 1 / 0 }}", TURNS + "{{ '{{' }}" + ASKED]
)
def test_chats_that_no_fixed_texts_make_have_no_template(template: str, tmp_path: Path) -> None:
    assert chats(tmp_path, template) is None


def test_a_prompt_of_one_column_is_a_template() -> None:
    assert template_of_rows(RowOptions(prompt_template=r"Tweet: {text}\nMood:")) == "Tweet: {{ .Prompt }}\nMood:"
    for other in (None, "{a} and {b}", "{a} and {a}", "{{{{ {a} }}}}"):
        assert template_of_rows(RowOptions(prompt_template=other)) is None
