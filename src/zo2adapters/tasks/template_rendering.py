"""The program of a limited process that renders chat templates."""

from __future__ import annotations

import json
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template


def answer(request: dict[str, Any]) -> str:
    """Render one conversation as ``tokenizer.apply_chat_template`` does.

    Args:
        request: ``messages``, as JSON; ``template``; ``special_tokens`` by name; ``reply_follows``; and ``longest``, the
            most characters of the text.

    Raises:
        ValueError: if the text is longer than ``longest``.
    """
    messages = [
        {key: value for key, value in message.items() if value is not None} for message in json.loads(request["messages"])
    ]
    rendered: Any = render_jinja_template(
        conversations=[messages],
        chat_template=request["template"],
        add_generation_prompt=request["reply_follows"],
        **request["special_tokens"],
    )
    ((text,), _) = rendered
    if len(text) > request["longest"]:
        raise ValueError(f"a text of {len(text)} characters, but at most {request['longest']} are allowed")
    return str(text)
