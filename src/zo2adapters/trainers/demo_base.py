"""The demo's base model: a small Llama, made on the spot and pre-trained with first-order steps.

MeZO needs such a start: pre-training makes the features that tell a docstring's text from code, and zeroth-order steps,
which learn little from scratch, only have to tie them to the answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zo2adapters.tasks.demo_task import LABELS, pretraining_texts, question_rows, source_texts, write_rows
from zo2adapters.trainers.batching import Batching
from zo2adapters.trainers.lr_schedules import Decay, LearningRate
from zo2adapters.trainers.optimization import Optimization
from zo2core.checkpoint import require_unused

PAD = "<pad>"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and hyperparameters of a demo; the defaults take about two minutes on two cores."""

    vocabulary: int = 1024  # tokens, at least 257
    hidden: int = 96  # width of the residual stream
    layers: int = 3
    heads: int = 3
    characters: int = 4_000_000  # of pre-training text
    window: int = 64  # tokens of a pre-training row
    windows: int = 32  # pre-training rows a step
    pretraining_steps: int = 600  # first-order steps
    pretraining_lr: float = 5e-3  # peak, of AdamW
    training_rows: int = 1536  # even
    evaluation_rows: int = 256  # even
    pairs_per_file: int = 8  # most that one source file gives, so that no file dominates
    steps: int = 3000  # zeroth-order steps
    batching: Batching = field(default_factory=lambda: Batching(batch_size=16))
    # Twice this learning rate diverges: a zeroth-order step moves every weight, so its limit falls as their number grows.
    optimization: Optimization = field(default_factory=lambda: Optimization(lr=3e-4, zo_eps=1e-3, decay=Decay.LINEAR))


RECIPE = Recipe()


RECIPE = Recipe()


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """A base model, and a task that its pre-training has not seen."""

    model: Path  # directory in the Hugging Face layout, with a tokenizer
    train: Path  # JSONL file of prompts and completions
    evaluation: Path  # the same, from other source files
    labels: tuple[str, ...]  # every completion there is
    parameters: int  # how many the model has
    pretraining_losses: tuple[float, ...]  # one a first-order step, in nats a token
    pretraining_seconds: float


def prepare(directory: Path, *, seed: int, recipe: Recipe = RECIPE, quiet: bool = False) -> DemoTask:
    """Make a base model, and a task held out from its pre-training.

    Args:
        directory: Gets base/, train.jsonl and evaluation.jsonl. Must not exist or be empty.
        seed: Decides the split into files, the initial weights and the order of the text; global generators are left alone.
        recipe: Sizes and hyperparameters.
        quiet: No progress bar.

    Returns:
        Where model and rows are.

    Raises:
        OutputError: if the directory is in use.
        DataError: if this Python lacks the sources of its standard library.
    """
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
    """A byte-level BPE. It has no EOS: an answer is one token, and all of a row's loss is about it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # transformers leaves this constructor untyped
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD)  # type: ignore[no-untyped-call]


def _random_model(vocabulary: int, recipe: Recipe, seed: int) -> LlamaForCausalLM:
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
        if parameter.dim() == 2:  # norms stay at one; the embedding is the head, too, where 0.02 starts at even odds
            scale = 0.02 if name == "model.embed_tokens.weight" else parameter.shape[1] ** -0.5
            torch.nn.init.normal_(parameter, 0.0, scale, generator=generator)
    return model


def _pretrain(model: LlamaForCausalLM, ids: torch.Tensor, recipe: Recipe, *, seed: int, quiet: bool) -> tuple[float, ...]:
    """First-order steps on random windows of the tokens, (tokens,); returns each step's loss."""
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
