"""Tiny models of every adapter, and batches, as hypothesis draws them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BloomConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from zo2adapters import Architecture

LONGEST = 12  # tokens
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# of a whole vocabulary
WORDS = ["<pad>", "</s>", "<unk>", "the", "cat", "dog", "sat", "ran", "is", "yes", "no"]

BLOOM_CONFIG = BloomConfig(vocab_size=40, hidden_size=12, n_layer=2, n_head=3)
BLOOM = Architecture(
    model_type="bloom",
    embedding=("transformer.word_embeddings", "transformer.word_embeddings_layernorm"),
    blocks="transformer.h",
    head=("transformer.ln_f", "lm_head"),
    returned=1,
)


@st.composite
def opt_configs(draw: st.DrawFn) -> OPTConfig:
    heads = draw(st.integers(1, 3))
    hidden = heads * draw(st.integers(2, 6))
    return OPTConfig(
        vocab_size=draw(st.integers(17, 60)),
        hidden_size=hidden,
        ffn_dim=draw(st.integers(3, 20)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        max_position_embeddings=LONGEST,
        word_embed_proj_dim=draw(st.sampled_from([hidden, 5])),
        do_layer_norm_before=draw(st.booleans()),
        enable_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
    )


def _rotary(draw: st.DrawFn) -> dict[str, Any]:
    groups, shared = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    head_dim = draw(st.sampled_from([2, 4, 6]))
    return {
        "vocab_size": draw(st.integers(17, 60)),
        "hidden_size": groups * shared * head_dim,
        "intermediate_size": draw(st.integers(3, 20)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": groups * shared,
        "num_key_value_heads": groups,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": draw(st.booleans()),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


@st.composite
def llama_configs(draw: st.DrawFn) -> LlamaConfig:
    return LlamaConfig(
        **_rotary(draw), attention_bias=draw(st.booleans()), mlp_bias=draw(st.booleans())
    )


@st.composite
def qwen2_configs(draw: st.DrawFn) -> Qwen2Config:
    window: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 1,
    }
    return Qwen2Config(**_rotary(draw), **(window if draw(st.booleans()) else {}))


@st.composite
def qwen3_configs(draw: st.DrawFn) -> Qwen3Config:
    return Qwen3Config(**_rotary(draw), head_dim=draw(st.sampled_from([2, 4, 8])))


CONFIGS = {
    "opt": opt_configs(),
    "llama": llama_configs(),
    "qwen2": qwen2_configs(),
    "qwen3": qwen3_configs(),
}


def small_config(model_type: str = "opt", **changes: Any) -> PretrainedConfig:
    """One fixed configuration an architecture, for tests that do not draw."""
    if model_type == "gpt2":
        sizes: dict[str, Any] = {
            "vocab_size": 40,
            "n_embd": 12,
            "n_layer": 2,
            "n_head": 3,
            "n_positions": LONGEST,
        }
        no_dropout: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        return GPT2Config(
            **{**sizes, **no_dropout, "bos_token_id": 1, "eos_token_id": 2, **changes}
        )
    if model_type == "opt":
        shape = {"hidden_size": 12, "ffn_dim": 20, "word_embed_proj_dim": 12}
        kind: type[PretrainedConfig] = OPTConfig
    else:
        kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[model_type]
        shape = {
            "hidden_size": 12,
            "intermediate_size": 20,
            "num_key_value_heads": 3,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    common = {
        "vocab_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": LONGEST,
    }
    return kind(**{**shape, **common, **changes})


def random_model(
    config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    auto_class: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """A whole model in which every parameter, norms and biases too, is random."""
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = auto_class.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        value = torch.empty(parameter.shape).normal_(0.0, 0.3, generator=generator)
        parameter.data.copy_(value + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def save_model(
    directory: Path,
    config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    *,
    max_shard_size: str = "5GB",
    auto_class: Any = AutoModelForCausalLM,
) -> Path:
    """A checkpoint of a random model in the Hugging Face layout."""
    random_model(config, dtype, auto_class=auto_class).save_pretrained(
        directory, max_shard_size=max_shard_size
    )
    return directory


def save_classifier(directory: Path, *, labels: int = 2, **changes: Any) -> Path:
    """A Llama that tells so many classes apart, with its tokenizer."""
    config = small_config(
        "llama", **{"vocab_size": len(WORDS), "pad_token_id": 0, "num_labels": labels, **changes}
    )
    save_tokenizer(save_model(directory, config, auto_class=AutoModelForSequenceClassification))
    return directory


def make_batch(
    vocab_size: int, lengths: list[int], *, seed: int = 0, left: bool = False
) -> dict[str, torch.Tensor]:
    """A padded batch of random tokens; some labels inside are -100 as well."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(vocab_size, (len(lengths), longest), generator=generator)
    place = torch.arange(longest)
    rows = [(place >= longest - n) if left else (place < n) for n in lengths]
    mask = torch.stack(rows).to(torch.int64)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@st.composite
def batches(draw: st.DrawFn, vocab_size: int) -> dict[str, torch.Tensor]:
    lengths = draw(st.lists(st.integers(2, LONGEST), min_size=1, max_size=3))
    return make_batch(vocab_size, lengths, seed=draw(st.integers(0, 9)), left=draw(st.booleans()))


def save_tokenizer(
    directory: Path, words: Sequence[str] = WORDS, *, pad: str = "<pad>", eos: str = "</s>"
) -> None:
    """Lay a tokenizer of whole words beside a model, whose texts end as the tokenizer's do."""
    tokenizer = Tokenizer(
        tokenizer_models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast  # its constructor is untyped
    fast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos).save_pretrained(directory)
    if (directory / "generation_config.json").exists():  # which ends texts, too
        config: Any = GenerationConfig
        config(eos_token_id=list(words).index(eos)).save_pretrained(directory)


def candidate_scores(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean log-probability of each row's candidate, (prompts, 2), from all logits."""
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    wanted = labels != -100
    values = (
        logits.float()
        .log_softmax(-1)
        .gather(2, labels.masked_fill(~wanted, 0)[:, :, None])[:, :, 0]
    )
    scores: torch.Tensor = (values.double() * wanted).sum(1) / wanted.sum(1)
    return scores.view(-1, 2)


def continuations(
    whole: Any, prompts: Sequence[list[int]], new: int, eos: int | None
) -> list[list[int]]:
    """What transformers' own generate writes after each prompt, by itself and greedily."""
    continued = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {
            "max_new_tokens": new,
            "do_sample": False,
            "eos_token_id": eos,
            "pad_token_id": 0,
        }
        continued.append(
            whole.generate(ids, attention_mask=torch.ones_like(ids), **options)[
                0, len(prompt) :
            ].tolist()
        )
    return continued


def mean_log_likelihood(directory: Path, prompt: str, completion: str) -> float:
    """The mean log-probability of the completion's tokens, by transformers."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    ids, start = tokenizer(prompt + completion).input_ids, len(tokenizer(prompt).input_ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return float(logits[range(start - 1, len(ids) - 1), ids[start:]].mean())
