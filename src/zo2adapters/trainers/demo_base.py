"""The demo's base model: a small Llama, created and pre-trained with first-order steps when the demo runs.

Zeroth-order steps learn little from scratch. Pre-training makes the features that tell a docstring from code, and MeZO only
has to connect them with the answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import ByteLevelBPETokenizer, Tokenizer
from tqdm import tqdm

from zo2adapters.tasks.demo_task import LABELS, pretraining_texts, question_rows, source_texts, write_rows
from zo2adapters.trainers.optimization import Decay, LearningRate, Optimization
from zo2adapters.trainers.options import Batching

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


PAD = "<pad>"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and hyperparameters of the demo; with the defaults it takes about two minutes on two cores."""

    vocabulary: int = 1024  # tokens, at least 257
    hidden: int = 96  # width of the residual stream
    layers: int = 3
    heads: int = 3
    characters: int = 4_000_000  # of pre-training text
    window: int = 64  # tokens of a pre-training row
    windows: int = 32  # pre-training rows per step
    pretraining_steps: int = 600  # first-order steps
    pretraining_lr: float = 5e-3  # AdamW's peak learning rate
    training_rows: int = 1536  # an even number
    evaluation_rows: int = 256  # an even number
    pairs_per_file: int = 8  # most row pairs from one source file, so that no file dominates
    steps: int = 3000  # zeroth-order steps
    batching: Batching = field(default_factory=lambda: Batching(batch_size=16))
    # Twice this learning rate diverges. A zeroth-order step moves every weight, so the limit falls as their number grows.
    optimization: Optimization = field(default_factory=lambda: Optimization(lr=3e-4, zo_eps=1e-3, decay=Decay.LINEAR))


RECIPE = Recipe()


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """A base model, and a task that was held out from its pre-training."""

    model: Path  # directory in the Hugging Face layout, with a tokenizer
    train: Path  # JSONL file of prompts and completions
    evaluation: Path  # JSONL file of the same form, made from other source files
    labels: tuple[str, ...]  # all possible completions
    parameters: int  # number of the model's parameters
    pretraining_losses: tuple[float, ...]  # loss of each first-order step, in nats per token
    pretraining_seconds: float


def prepare(directory: Path, *, seed: int, recipe: Recipe = RECIPE, quiet: bool = False) -> DemoTask:
    """Make a base model, and a task held out from its pre-training."""
    import torch

    from zo2core.checkpoint.shards import require_unused

    require_unused(directory)
    files = source_texts(seed=seed)
    texts = pretraining_texts(files, recipe.characters)
    known = "\n".join(texts)
    pairs = recipe.pairs_per_file
    evaluation = question_rows(files, recipe.evaluation_rows, pairs_per_file=pairs, known=known)
    known = "\n".join([known, *(row["prompt"] for row in evaluation)])
    train = question_rows(files, recipe.training_rows, pairs_per_file=pairs, known=known)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(texts, recipe.vocabulary)
    tokenizer.save_pretrained(directory / "base")
    ids = torch.tensor(list(chain.from_iterable(tokenizer(texts, verbose=False)["input_ids"])))
    model = _random_model(len(tokenizer), recipe, seed)
    began = time.perf_counter()
    losses = _pretrain(model, ids, recipe, seed=seed, quiet=quiet)
    model.save_pretrained(directory / "base")
    return DemoTask(
        model=directory / "base",
        train=write_rows(directory / "train.jsonl", train),
        evaluation=write_rows(directory / "evaluation.jsonl", evaluation),
        labels=LABELS,
        parameters=model.num_parameters(),
        pretraining_losses=losses,
        pretraining_seconds=time.perf_counter() - began,
    )


def _train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE without an EOS token: an answer is one token, and the loss of a row is that token's."""
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocabulary, min_frequency=0, special_tokens=[PAD], show_progress=False)
    # transformers does not type this constructor.
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained.to_str()), pad_token=PAD)  # type: ignore[no-untyped-call]


def _random_model(vocabulary: int, recipe: Recipe, seed: int) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.hidden * 8 // 3,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):  # transformers draws initial weights from the global generator
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:  # norms stay at one; the embedding is also the head, where 0.02 gives even odds at first
            scale = 0.02 if name == "model.embed_tokens.weight" else parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, 0.0, scale, generator=generator)
    return model


def _pretrain(model: LlamaForCausalLM, ids: torch.Tensor, recipe: Recipe, *, seed: int, quiet: bool) -> tuple[float, ...]:
    """Take first-order steps on random windows of the tokens, shape (tokens,). Returns the loss of each step."""
    import torch

    generator, steps = torch.Generator().manual_seed(seed), recipe.pretraining_steps
    lr = LearningRate(peak=recipe.pretraining_lr, decay=Decay.COSINE, warmup_steps=steps // 20, steps=steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.pretraining_lr, betas=(0.9, 0.95), weight_decay=0.01)
    losses: list[float] = []
    for step in tqdm(range(steps), desc="pre-training", unit="step", disable=quiet, file=sys.stderr, dynamic_ncols=True):
        optimizer.param_groups[0]["lr"] = lr(step)
        starts = torch.randint(len(ids) - recipe.window, (recipe.windows, 1), generator=generator)
        batch = ids[starts + torch.arange(recipe.window)]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses)
