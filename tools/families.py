"""Test the decoder families of the installed transformers: a tiny model of each, against the
resident model.

    python tools/families.py --output families.json
    python tools/families.py --lora auto --output first-order-families.json
    python tools/families.py --lora auto experts --output first-order-families-experts.json

For every model type of ``AutoModelForCausalLM`` a config with small sizes is made from its
defaults; families that cannot be built are listed with the reason. A checkpoint with random weights
is saved and opened without a declaration, and steps are compared with monolithic MeZO on the model
that ``from_pretrained`` loads, without a cache of keys and values, in float32 and bfloat16: every
loss has to be equal. The loss with logits in chunks has to be equal up to the order of its sum, as
have the scores of candidates. Unless generation is refused, the tokens of ``generate`` for one
prompt and for two of different lengths have to be those of transformers. An exported model has to
load with ``from_pretrained`` and give the same loss. With ``--lora`` each is trained with LoRA on
these targets instead, for three steps of SGD on a padded batch in float32, and losses and
parameters have to equal peft's on the whole model. Prints a table and JSON.
"""

import inspect
import itertools
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import peft
import torch
import transformers
from measuring import command, resident_step
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zo2adapters import Adapter, MonolithicMeZO, open_checkpoint
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.generation import generate
from zo2adapters.tasks.objectives import score
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, FirstOrder, MeZOSGD, ZerothOrder, ZO2Error
from zo2core.errors import UnsupportedModelError

MOST_PARAMETERS = 3_000_000  # parameters of a tiny model, at most
VOCABULARY, STEPS = 40, 2
NUMBERS: dict[str, Any] = {"lr": 1e-2, "zo_eps": 1e-2}
LORA_STEPS, LR = 3, 1e-2
SGD = partial(torch.optim.SGD, lr=LR)
PROMPTS = [[7, 3, 11, 20], [5, 9]]
PROMPTED = [PROMPTS[:1], PROMPTS]  # prompts of one length, and of two: the shorter one is padded
CANDIDATES = [[[4], [6, 8]], [[10, 12, 13], [14]]]
NEW_TOKENS = 12  # more than the sliding windows of these models
DTYPES = (torch.float32, torch.bfloat16)
SUMMED = {torch.float32: 1e-5, torch.bfloat16: 0.03}  # relative tolerance of a sum in another order

MLA = {"num_key_value_heads": 4}  # latent attention has equally many heads of keys and of queries

# Names of sizes in configs, and small values.
SMALL: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "n_embd",
            "d_model",
            "dim",
            "embedding_size",
            "embed_dim",
            "word_embed_proj_dim",
        ),
        16,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "attention_hidden_size",
            "lru_width",
        ),
        16,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 32
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "moe_topk"), 2
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "linear_num_value_heads"), 2
    ),
    **dict.fromkeys(("num_experts_per_tok", "global_attn_every_n_layers"), 2),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "mamba_n_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "rotary_dim",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "v_head_dim",
            "moe_num_experts",
        ),
        4,
    ),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 4
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "mamba_n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(
        ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups"), 1
    ),
    **dict.fromkeys(
        (
            "q_lora_rank",
            "kv_lora_rank",
            "state_size",
            "mamba_d_head",
            "mamba_d_state",
            "sliding_window",
        ),
        8,
    ),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "attention_window_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Further values that a small model of a family needs.
ALSO: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3", "youtu"), MLA
    ),
    **dict.fromkeys(
        ("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "longcat_flash", "bailing_hybrid"), MLA
    ),
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 16, "mamba_d_head": 4},
    "gemma3n_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "intermediate_size": 32,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0],
        "num_kv_shared_layers": 1,
        "laurel_rank": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_d_head": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 8, "n_groups": 2},
    "nemotron_h": {
        "layers_block_type": ["full_attention", "mlp"],
        "mamba_head_dim": 8,
        "mamba_num_heads": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba2": {
        "num_hidden_layers": 4,
        # two hybrid layers share one transformer
        "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
        "layer_types": ["hybrid", "linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 32,
        "attention_head_dim": 8,
        "num_key_value_heads": 4,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "adapter_rank": 4,
        "chunk_size": 8,
    },
}


# sizes of vision towers, of which an image has four patches, and its tokens
TOWER: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "projection_dim"), 16),
    **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_attention_heads", "num_heads"), 2),
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
}
IMAGE_TOKENS = {
    "image_token_id": 39,
    "image_token_index": 39,
    "vision_start_token_id": 38,
    "vision_end_token_id": 37,
    "video_token_id": 36,
    "boi_token_index": 38,
    "eoi_token_index": 37,
}


def reads_images(config: PretrainedConfig) -> bool:
    return type(config) in AutoModelForImageTextToText._model_mapping


def class_of(config: PretrainedConfig) -> Any:
    """The class that a checkpoint of this config names."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def small_config(model_type: str) -> PretrainedConfig:
    kind: Any = CONFIG_MAPPING[model_type]
    if not {"text_config", "vision_config"} <= kind.sub_configs.keys():
        plain: PretrainedConfig = kind(**_small_sizes(kind(), model_type))
        return plain
    default = kind()
    of_text: Any = default.text_config
    text = {"model_type": of_text.model_type, **_small_sizes(of_text, of_text.model_type)}
    rope = getattr(of_text, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        text |= {"head_dim": 8, "rope_parameters": {**rope, "mrope_section": [1, 1, 2]}}
    tower: Any = default.vision_config
    vision: dict[str, Any] = {"model_type": tower.model_type}
    for name, size in TOWER.items():
        if hasattr(tower, name):
            before = getattr(tower, name)
            is_list = isinstance(before, (list, tuple)) and not isinstance(size, list)
            vision[name] = [size] * len(before) if is_list else size
    tokens = {name: token for name, token in IMAGE_TOKENS.items() if hasattr(default, name)}
    config: PretrainedConfig = kind(text_config=text, vision_config=vision, **tokens)
    return config


def _small_sizes(default: PretrainedConfig, model_type: str) -> dict[str, Any]:
    """Small values of a config of text."""
    kind: Any = type(default)
    sizes: dict[str, Any] = {
        name: size for name, size in SMALL.items() if _takes_size(default, name)
    }
    layer_types = getattr(default, "layer_types", None)
    if layer_types is not None and not _is_computed(
        kind, kind.attribute_map.get("layer_types", "layer_types")
    ):
        sizes["layer_types"] = (list(dict.fromkeys(layer_types)) * 2)[:2]  # one of each
    return {**sizes, **ALSO.get(model_type, {})}


def _takes_size(config: PretrainedConfig, name: str) -> bool:
    try:
        value = getattr(config, name)
    except Exception:  # there is no such config, or one for each layer
        return False
    return not isinstance(value, (list, dict)) and not _is_computed(type(config), name)


def _is_computed(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), property)


def small_model(config: PretrainedConfig) -> PreTrainedModel:
    """Make a model with random weights that takes the test's batch; one that is not tiny is
    refused.
    """
    build: Any = class_of(config).from_config
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in build(config).parameters())
    if numel > MOST_PARAMETERS:
        raise ValueError(f"{numel:,} parameters with these sizes")
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = build(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        value = torch.empty(parameter.shape).normal_(0.0, 0.3, generator=generator)
        parameter.data.copy_(value + (1.0 if parameter.dim() == 1 else 0.0))
    model(**random_batch(VOCABULARY, 2, 6, seed=0))
    return model


def tried(work: Callable[[], dict[str, Any]], directory: Path) -> dict[str, Any]:
    """What a comparison finds, or the error that ends it."""
    try:
        return work()
    except ZO2Error as error:
        return {
            "outcome": "refused",
            "error": str(error).replace(f"{directory}/", "").replace(str(directory), "base"),
        }
    except Exception as error:  # this program lists all failures
        return {"outcome": "failed", "error": f"{type(error).__name__}: {error}"}


def compare(model: PreTrainedModel, dtype: torch.dtype, directory: Path) -> dict[str, Any]:
    """Open a model's checkpoint without a declaration, and compare its steps with the resident
    model's.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(directory)
    return tried(partial(compare_steps, dtype, directory), directory)


def compare_steps(dtype: torch.dtype, directory: Path) -> dict[str, Any]:
    batch, near = random_batch(VOCABULARY, 2, 6, seed=0), SUMMED[dtype]
    began = time.perf_counter()
    opened = open_checkpoint(directory)
    seconds = time.perf_counter() - began
    with Engine(open_checkpoint(directory, loss_chunk=3)) as replayer:
        chunked = replayer.evaluate([batch]).loss
    with Engine(opened) as replayer:
        scores = sum(score(replayer, opened, PROMPTS, CANDIDATES).log_likelihoods, ())
        generated = [(generated_tokens(replayer, opened, prompts), prompts) for prompts in PROMPTED]
    with Engine(open_checkpoint(directory), ZerothOrder(MeZOSGD(**NUMBERS))) as engine:
        losses = [engine.step(batch, seed=step).losses for step in range(STEPS)]
        trained = engine.evaluate([batch]).loss
        engine.export(directory / "exported")
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    whole.config.use_cache = False
    monolithic = MonolithicMeZO(whole, **NUMBERS)
    pairs = zip(scores, stock_scores(whole), strict=True)
    agree = {
        "chunked loss": math.isclose(chunked, float(monolithic.loss(batch)), rel_tol=near),
        "scores": all(math.isclose(own, stock, rel_tol=near, abs_tol=near) for own, stock in pairs),
        "generation": all(
            isinstance(own, str) or own == stock_tokens(whole, prompts)
            for own, prompts in generated
        ),
        "steps": losses == [monolithic.step(batch, step).losses for step in range(STEPS)],
        "export": trained == stock_loss(directory / "exported", dtype, batch),
    }
    differing = [name for name, agrees in agree.items() if not agrees]
    return {
        "outcome": "different" if differing else "equal",
        "opening_seconds": seconds,
        "generation": next((own for own, _ in generated if isinstance(own, str)), "generates"),
        **({"differing": differing} if differing else {}),
    }


def generated_tokens(
    replayer: Engine, model: HFBlockModel, prompts: list[list[int]]
) -> list[list[int | None]] | str:
    """The tokens with which greedy generation continues each prompt, or the reason why it is
    refused.
    """
    try:
        steps = list(generate(replayer, model, prompts, max_new_tokens=NEW_TOKENS))
    except UnsupportedModelError as error:
        return f"refused: {error}"
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def stock_tokens(whole: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens with which transformers continues the same prompts, padded on the left to one
    length.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    whole.generation_config.eos_token_id = None
    given: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "use_cache": True}
    tokens: list[list[int]] = whole.generate(ids, attention_mask=mask, **given)[  # type: ignore[operator]
        :, longest:
    ].tolist()
    return tokens


@torch.inference_mode()
def stock_scores(whole: PreTrainedModel) -> list[float]:
    """The candidates' log-likelihoods under the resident model."""
    scores = []
    for prompt, answers in zip(PROMPTS, CANDIDATES, strict=True):
        for answer in answers:
            ids = torch.tensor([[*prompt, *answer]])
            logits = whole(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
            ).logits.float()
            rated = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            scores.append(float(rated.gather(1, torch.tensor(answer)[:, None]).sum()))
    return scores


@torch.inference_mode()
def stock_loss(directory: Path, dtype: torch.dtype, batch: Mapping[str, torch.Tensor]) -> float:
    """The loss of an exported model, loaded by transformers without missing or unexpected
    tensors.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, output_loading_info=True
    )
    whole, loading = loaded
    if loading["missing_keys"] or loading["unexpected_keys"] or loading["mismatched_keys"]:
        return math.nan
    return float(whole(**batch, use_cache=False).loss)


def try_family(model_type: str, targets: Sequence[str] | None) -> dict[str, Any]:
    """Compare one family in each dtype, or with LoRA on these targets in float32."""
    try:
        model = small_model(small_config(model_type))
    except Exception as error:  # any: what a family's own code makes of small sizes
        return {"not_built": f"{type(error).__name__}: {error}"[:200]}
    with tempfile.TemporaryDirectory() as folder:
        if targets is None:
            return {
                str(dtype).removeprefix("torch."): compare(model, dtype, Path(folder, str(dtype)))
                for dtype in DTYPES
            }
        model.save_pretrained(folder)
        # of the class that the checkpoint names, whose layers' names the adapter has
        loaded_class = class_of(model.config)
        resident = partial(loaded_class.from_pretrained, folder, dtype=torch.float32)
        return {
            "float32": tried(lambda: train_lora(Path(folder), targets, resident)[1], Path(folder))
        }


def batch() -> dict[str, torch.Tensor]:
    """A batch of two rows of six tokens, one of them padded on the right."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained_by_peft(
    whole: Any,
    config: Any,
    first: dict[str, torch.Tensor],
    rows: dict[str, torch.Tensor],
    *,
    steps: int,
    make: Any = SGD,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train peft's adapter on the whole model from its first values; return losses and
    parameters.
    """
    step = resident_step(whole, itertools.repeat(rows), make, config=config, first=first)
    losses = [step() for _ in range(steps)]
    return losses, {
        name: parameter.detach() for name, parameter in whole.named_parameters() if name in first
    }


def train_lora(
    checkpoint: Path, targets: Sequence[str], resident: Callable[[], Any], steps: int = LORA_STEPS
) -> tuple[HFBlockModel, dict[str, Any]]:
    """Train LoRA over a checkpoint's blocks and by peft on the resident model; return the model and
    what differs.
    """
    config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    model: Any = open_checkpoint(checkpoint, adapter=Adapter(config=config, seed=1))
    with Engine(model, FirstOrder(SGD)) as engine:
        first = {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}
        losses = [engine.step(batch()).loss for _ in range(steps)]
        learned = {name: value.clone() for name, value in engine.parameters_now() if name in first}
    expected, trained = trained_by_peft(
        resident(), model.adapter.config, first, batch(), steps=steps
    )
    other = [
        name
        for name in learned
        if name not in trained or not torch.equal(learned[name], trained[name])
    ]
    is_equal = not other and losses == expected
    return model, {
        "outcome": "equal" if is_equal else "different",
        "losses": [losses, expected],
        "parameters": other[:5],
    }


def table(families: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    for name, family in families.items():
        if "not_built" not in family:
            texts = (
                str(outcome.get("error", outcome.get("differing", "")))
                for outcome in family.values()
            )
            outcomes = "".join(f"{outcome['outcome']:11s}" for outcome in family.values())
            yield f"{name:24s}{outcomes}{next(filter(None, texts), '')[:110]}"


def counts(families: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    """The number of families with each outcome, in both dtypes or in one of them."""
    outcomes = [
        {one["outcome"] for one in family.values()}
        for family in families.values()
        if "not_built" not in family
    ]
    counted = {
        "families": len(families),
        "built": len(outcomes),
        "equal": sum(found == {"equal"} for found in outcomes),
    }
    return counted | {
        name: sum(name in found for found in outcomes)
        for name in ("different", "refused", "failed")
    }


@command
def main(
    *,
    families: Sequence[str] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    lora: Annotated[Sequence[str] | None, "train LoRA on these layers"] = None,
    output: Annotated[Path | None, "file for the JSON"] = None,
) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if lora:
        torch.set_num_threads(1)
    found = {model_type: try_family(model_type, lora) for model_type in families}
    print("\n".join(table(found)), counted := counts(found), sep="\n")
    measured = {
        "transformers": transformers.__version__,
        "lora": lora,
        "counts": counted,
        "families": found,
    }
    text = json.dumps(measured, indent=1)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n")


if __name__ == "__main__":
    main()
