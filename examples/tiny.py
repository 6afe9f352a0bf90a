"""What the examples train: a Llama of random weights, and rows that count."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

VOCABULARY = 32

logging.disable_progress_bar()


def save_tiny_model(folder: Path, *, width: int = 64, layers: int = 4) -> Path:
    """Save a model in Hugging Face's layout; any that you have takes its place."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def counting_batch(step: int, rows: int = 8, tokens: int = 12) -> dict[str, torch.Tensor]:
    """Rows of consecutive numbers: after the first token all others are known."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(VOCABULARY, (rows, 1), generator=generator)
    ids = (starts + torch.arange(tokens)) % VOCABULARY
    return {"input_ids": ids, "labels": ids}
