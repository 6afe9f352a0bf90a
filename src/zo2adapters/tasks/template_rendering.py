"""The program of a limited process that renders chat templates."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Self

from transformers.utils import chat_template_utils


def answer(request: dict[str, Any]) -> str:
    """Render one conversation as ``tokenizer.apply_chat_template`` does."""
    messages = [
        {key: value for key, value in message.items() if value is not None}
        for message in json.loads(request["messages"])
    ]
    rendered_at = request["rendered_at"]

    class RecordedTime(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Self:
            return super().now(tz) if rendered_at is None else cls.fromisoformat(rendered_at)

    chat_template_utils.datetime = RecordedTime  # type: ignore[attr-defined]
    rendered: Any = chat_template_utils.render_jinja_template(
        conversations=[messages],
        chat_template=request["template"],
        add_generation_prompt=request["reply_follows"],
        **request["special_tokens"],
    )
    ((text,), _) = rendered
    if len(text) > request["longest"]:
        raise ValueError(
            f"a text of {len(text)} characters, but at most {request['longest']} are allowed"
        )
    return str(text)
