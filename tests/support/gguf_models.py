"""GGUF files, written byte by byte so that tests can write wrong ones, and tiny models as
llama.cpp's converter has them.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from models import random_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from zo2adapters import open_checkpoint
from zo2adapters.models.export import export_gguf
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2core import Engine
from zo2core.encodings.forms import GGUF_BLOCKS

TYPE_NUMBERS = {kind.name: int(kind) for kind in gguf.GGMLQuantizationType}
_SCALARS = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}


class Tensor(NamedTuple):
    """A tensor to write: sizes in torch's order, and its bytes."""

    name: str
    shape: Sequence[int]
    kind: str | int
    content: bytes
    offset: int | None = None  # None: behind the tensor before


def text(value: str | bytes) -> bytes:
    """A string as GGUF has it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(value: Any) -> bytes:
    """A value's type and the value."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        # llama.cpp has signed ones in arrays
        kind, layout = {**_SCALARS, str: (8, ""), int: (5, "i")}[type(value[0])]
        items = (text(item) if kind == 8 else struct.pack(f"<{layout}", item) for item in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)
    kind, layout = _SCALARS[type(value)]
    return struct.pack(f"<I{layout}", kind, value)


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Sequence[Tensor], *, version: int = 3, alignment: int = 32
) -> bytes:
    """A GGUF file."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(text(key) + scalar(value) for key, value in metadata.items())
    data = b""
    for tensor in tensors:
        offset = len(data) if tensor.offset is None else tensor.offset
        number = tensor.kind if isinstance(tensor.kind, int) else TYPE_NUMBERS[tensor.kind]
        sizes = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        header += (
            text(tensor.name)
            + struct.pack("<I", len(tensor.shape))
            + sizes
            + struct.pack("<IQ", number, offset)
        )
        data += tensor.content + bytes(-len(tensor.content) % alignment)
    return header + bytes(-len(header) % alignment) + data


MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("a", "t"),
    ("c", "at"),
    ("Ġ", "cat"),
    ("i", "s"),
    ("Ġ", "is"),
]
MERGES += [("1", "2"), ("Ġ", "12")]  # which bind where digits are not split
TOKENS: list[str] = [
    *bytes_to_unicode().values(),  # type: ignore[no-untyped-call]
    *("".join(pair) for pair in MERGES),
    "<|bos|>",
    "<|endoftext|>",
]
BOS, EOS = len(TOKENS) - 2, len(TOKENS) - 1
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
_KINDS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
    "gpt_oss": GptOssConfig,
    "phi3": Phi3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
}


def tiny_config(architecture: str, **changes: Any) -> PretrainedConfig:
    """A config whose rows are whole blocks of 32, and that follows from what a GGUF file says."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": 64,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "tie_word_embeddings": False,
    }
    if architecture == "qwen3":
        shape |= {"head_dim": 128}  # transformers' reader has no other
    if architecture == "qwen3moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        shape |= {"moe_intermediate_size": 768}  # transformers' reader has no other
    if architecture in ("mixtral", "gpt_oss"):
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if architecture.startswith("gemma"):
        shape |= {"tie_word_embeddings": True}
    if architecture == "phi3":
        del shape["head_dim"]
    return _KINDS[architecture](**{**shape, **changes})


# Bytes at which a block has float16 scales.
SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ1_S"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# Types that the gguf package cannot encode.
_RANDOM = {
    name: SCALES[name]
    for name in SCALES
    if name not in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0")
}


def packed(values: np.ndarray, kind: str, rng: np.random.Generator) -> bytes:
    """A matrix in blocks: encoded, or random codes where the gguf package has no encoder."""
    block = GGUF_BLOCKS[kind]
    if kind not in _RANDOM:
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind]).tobytes()
    codes = rng.integers(0, 256, (values.size // block.weights, block.nbytes), dtype=np.uint8)
    for at in _RANDOM[kind]:
        codes[:, at : at + 2] = (
            rng.uniform(1e-4, 4e-4, (len(codes), 1)).astype("<f2").view(np.uint8)
        )
    return codes.tobytes()


def metadata(architecture: str, config: PretrainedConfig) -> dict[str, Any]:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": 10000.0,
        "rope.dimension_count": head,
    }
    if architecture == "qwen3moe":
        own |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        own |= {"expert_feed_forward_length": config.moe_intermediate_size}
    if architecture.startswith("gemma"):
        own |= {"attention.sliding_window": config.sliding_window}
    return {
        "general.architecture": architecture,
        "general.name": "tiny",
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 2) + [3, 3],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.padding_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def tensors(
    architecture: str,
    model: PreTrainedModel,
    kind_of: Callable[[str], str],
    rng: np.random.Generator,
) -> list[Tensor]:
    """A model's tensors, as llama.cpp's converter has them."""
    config = model.config
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names, written = gguf.get_tensor_name_map(number, config.num_hidden_layers), []
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        values = parameter.detach().float().numpy()
        if path.endswith(".experts"):  # stacks, of which one parameter may hold two
            parts = ("gate", "up") if leaf == "gate_up_proj" else ("down",)
            places = [f"blk.{path.split('.')[2]}.ffn_{part}_exps.weight" for part in parts]
        else:
            places = [f"{names.get_name(path)}.{leaf}"]
        for place, own in zip(
            places,
            np.split(values, len(places), axis=1) if len(places) > 1 else [values],
            strict=True,
        ):
            if architecture == "llama" and (".attn_q." in place or ".attn_k." in place):
                heads = (
                    config.num_attention_heads
                    if ".attn_q." in place
                    else config.num_key_value_heads
                )
                own = own.reshape(heads, 2, -1, *own.shape[1:]).swapaxes(1, 2).reshape(own.shape)
            if architecture.startswith("gemma") and place.endswith("norm.weight"):
                own = own + 1
            kind = "F32" if own.ndim == 1 or "ffn_gate_inp" in place else kind_of(place)
            written.append(
                Tensor(place, own.shape, kind, packed(np.ascontiguousarray(own), kind, rng))
            )
    return written


def save_gguf(
    path: Path,
    architecture: str = "llama",
    kinds: str | Mapping[str, str] = "Q4_0",
    *,
    files: int = 1,
    further: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a random model in one file or several, the first of which is returned.

    Kinds are the type of all matrices, or types by part of a tensor's name, the first that fits,
    with "" for the rest.
    """
    config = tiny_config(architecture, **changes)
    chosen = {"": kinds} if isinstance(kinds, str) else kinds

    def kind_of(name: str) -> str:
        return next(kind for part, kind in chosen.items() if part in name)

    with torch.random.fork_rng(devices=[]):
        model = random_model(config)
    written = tensors(architecture, model, kind_of, np.random.default_rng(0))
    values = {**metadata(architecture, config), **(further or {})}
    assert {tensor.kind for tensor in written} <= TYPE_NUMBERS.keys()
    if files == 1:
        path.write_bytes(gguf_bytes(values, written))
        return path
    for number in range(files):
        part = {"split.no": number, "split.count": files, "split.tensors.count": len(written)}
        named = path.with_name(f"{path.stem}-{number + 1:05}-of-{files:05}.gguf")
        named.write_bytes(
            gguf_bytes({**(values if number == 0 else {}), **part}, written[number::files])
        )
    return path.with_name(f"{path.stem}-00001-of-{files:05}.gguf")


# in Llama 3's tokenizer.json
LLAMA_3_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3_SPLITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


def save_directory(
    path: Path, architecture: str, splitter: Any = SPLITTERS["gpt-2"], **changes: Any
) -> Path:
    """A model in the Hugging Face layout with a byte-level tokenizer."""
    config = tiny_config(architecture, **changes)
    random_model(config).save_pretrained(path)
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    backend = Tokenizer(
        tokenizer_models.BPE(
            vocab=vocabulary, merges=MERGES, ignore_merges=splitter is SPLITTERS["llama-bpe"]
        )
    )
    backend.pre_tokenizer, backend.decoder = splitter, decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in TOKENS[-2:]])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=TOKENS[BOS], eos_token=TOKENS[-1]
    )  # type: ignore[no-untyped-call]
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(path)
    return path


def export(base: Path, output: Path, **options: Any) -> Path:
    """Write a base as a GGUF file, and return its path."""
    model = open_checkpoint(base)
    with Engine(model) as engine:
        export_gguf(engine, model, output, base=base, tokenizer=load_tokenizer, **options)
    return output / "model.gguf"
