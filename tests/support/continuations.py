"""What transformers' own generate writes."""

from collections.abc import Sequence
from typing import Any

import torch


def by_hugging_face(whole: Any, prompts: Sequence[list[int]], new: int, eos: int | None) -> list[list[int]]:
    """Each prompt's continuation, by itself and greedily."""
    continued = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
        continued.append(whole.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())
    return continued
