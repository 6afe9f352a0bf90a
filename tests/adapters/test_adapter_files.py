"""Adapters as other programs save them: read where peft reads them, to its losses, or refused with
a remedy for what does not fit.
"""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done
from engines import assert_equal, zeroth_order
from families import batch, small_model
from families import small_config as family_config
from models import make_batch, save_model, small_config
from runs import weights_of
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models import adapter_files
from zo2adapters.models.adapter_files import PICKLED_FILE, WEIGHTS_FILE
from zo2adapters.models.pickled import new_reader
from zo2core import Engine, MeZOSGD
from zo2core.errors import CheckpointError, OptionError, ZO2Warning

peft: Any = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern"),  # its own
]

Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model."
Q = f"{PREFIX}model.layers.1.self_attn.q_proj"
EMBEDDING, HEAD = f"{PREFIX}model.embed_tokens.weight", f"{PREFIX}lm_head.weight"


def saved(base: Path, directory: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> Path:
    """An adapter with random values, as peft saves it."""
    options = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "up_proj"], **options}
    config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
    model = peft.get_peft_model(auto.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(directory, save_embedding_layers=True)
    return directory


def rewritten(adapter: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Change the tensors of an adapter's file."""
    tensors = change(load_file(adapter / WEIGHTS_FILE))
    (adapter / WEIGHTS_FILE).unlink()  # it may be mapped
    save_file({name: value.contiguous() for name, value in tensors.items()}, adapter / WEIGHTS_FILE)


@torch.no_grad()
def loss_in_peft(
    base: Path, adapter: Path, rows: Tensors, auto: Any = AutoModelForCausalLM
) -> float:
    whole = auto.from_pretrained(base)
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()  # what is mapped from a file rounds otherwise
    model = peft.PeftModel.from_pretrained(whole, adapter).eval()
    model.config.use_cache = False
    return float(model(**rows).loss)


def loss_of(base: Path, adapter: Path, rows: Tensors, **options: Any) -> float:
    opened = open_checkpoint(base, adapter=Adapter(config=adapter), **options)
    with Engine(opened) as engine:
        return engine.evaluate([rows]).loss


def lora_alone(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if "lora" in name}


FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "embeddings beside it": lambda tensors: tensors,
    "other embeddings beside it": lambda tensors: {
        name: value if "lora" in name else value + 0.5 for name, value in tensors.items()
    },
    "the adapter's name in its names": lambda tensors: {
        name.replace(".weight", ".default.weight"): value
        for name, value in lora_alone(tensors).items()
    },
    "numbers of 16 bits": lambda tensors: {
        name: value.half() for name, value in lora_alone(tensors).items()
    },
    "other tensors": lambda tensors: {
        **lora_alone(tensors),
        Q.replace("layers.1", "layers.7") + ".lora_A.weight": torch.ones(2, 12),
        f"{PREFIX}model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_any_form_that_peft_loads_is_read_to_its_loss(form: str, tmp_path: Path) -> None:
    if form == "the adapter's name in its names" and peft.__version__ < "0.21":
        pytest.skip("peft 0.20 loads no such file")
    base = save_model(tmp_path / "base", small_config("llama", tie_word_embeddings=False))
    adapter, rows = saved(base, tmp_path / "adapter"), make_batch(40, [7, 5])
    rewritten(adapter, FORMS[form])
    expected = loss_in_peft(base, adapter, rows)
    if form == "other tensors":
        with pytest.warns(ZO2Warning, match=r"2 tensor.* left out, .*such as model\.layers"):
            assert loss_of(base, adapter, rows) == expected
    else:
        assert loss_of(base, adapter, rows) == expected


def test_a_pickled_file_is_read_in_a_limited_process(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_reader() as child:  # which takes a second to start
        monkeypatch.setattr(adapter_files, "new_reader", lambda: nullcontext(child))
        read_pickled(base, tmp_path)


def read_pickled(base: Path, tmp_path: Path) -> None:
    adapter, rows = saved(base, tmp_path / "adapter"), make_batch(40, [7, 5])
    tensors = lora_alone(load_file(adapter / WEIGHTS_FILE))
    (adapter / WEIGHTS_FILE).unlink()
    torch.save(tensors, adapter / PICKLED_FILE)
    assert loss_of(base, adapter, rows) == loss_in_peft(base, adapter, rows)
    torch.save({**tensors, EMBEDDING: torch.ones(40, 12)}, adapter / PICKLED_FILE)
    with pytest.raises(CheckpointError, match=r"embed_tokens.*with peft and save it again"):
        loss_of(base, adapter, rows)
    torch.save({"a": loss_of}, adapter / PICKLED_FILE)
    with pytest.raises(CheckpointError, match=f"{PICKLED_FILE}.*does more than build tensors"):
        loss_of(base, adapter, rows)


@pytest.mark.parametrize(
    ("family", "targets"),
    [("mixtral", ["w1", "w2", "w3"]), ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"])],
)
def test_an_adapter_for_each_expert_is_read_as_those_of_stacks(
    family: str, targets: list[str], tmp_path: Path
) -> None:
    """Checkpoints keep experts apart, and adapters that were trained so have matrices for each."""
    base, adapter, tensors = tmp_path / "base", tmp_path / "adapter", Tensors()
    small_model(family_config(family)).save_pretrained(base)
    generator = torch.Generator().manual_seed(0)
    for name, weight in load_file(base / WEIGHTS_FILE.replace("adapter_", "")).items():
        if ".experts." in name:
            for matrix, shape in (("A", (2, weight.shape[1])), ("B", (weight.shape[0], 2))):
                key = f"{PREFIX}{name.removesuffix('weight')}lora_{matrix}.weight"
                tensors[key] = 0.3 * torch.randn(shape, generator=generator)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, task_type="CAUSAL_LM")
    config.save_pretrained(adapter)
    save_file(tensors, adapter / WEIGHTS_FILE)
    assert loss_of(base, adapter, batch()) == loss_in_peft(base, adapter, batch())


def test_embeddings_beside_an_adapter_are_trained_exported_and_merged_with_it(
    tmp_path: Path,
) -> None:
    base = save_model(tmp_path / "base", small_config("llama", tie_word_embeddings=False))
    adapter, rows = saved(base, tmp_path / "adapter"), make_batch(40, [7, 5])
    rewritten(adapter, FORMS["other embeddings beside it"])
    before = load_file(adapter / WEIGHTS_FILE)
    opened = open_checkpoint(base, adapter=Adapter(config=adapter))
    with zeroth_order(opened, MeZOSGD(lr=1e-2, zo_eps=1e-2)) as engine:
        engine.step(rows)
        trained = engine.evaluate([rows]).loss
        engine.export(tmp_path / "exported")
    after = load_file(tmp_path / "exported" / WEIGHTS_FILE)
    assert after.keys() == before.keys()
    assert {name for name in after if torch.equal(after[name], before[name])} == {EMBEDDING, HEAD}
    assert loss_in_peft(base, tmp_path / "exported", rows) == trained
    done("merge", "--model", base, "--adapter", adapter, "--output", tmp_path / "merged")
    whole = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    whole.merge_and_unload().save_pretrained(tmp_path / "peft")
    assert_equal(weights_of(tmp_path / "merged"), weights_of(tmp_path / "peft"))
    opened.require_unchanged()
    os.utime(adapter / WEIGHTS_FILE)  # which is streamed, too
    with pytest.raises(CheckpointError, match=f"{WEIGHTS_FILE}: found that another process"):
        opened.require_unchanged()


MISFITS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "a larger vocabulary": (
        lambda tensors: {**tensors, EMBEDDING: torch.ones(44, 12)},
        r"embed_tokens\.weight: found shape \[44, 12\]; .*resize .* to 44 tokens",
    ),
    "another rank": (
        lambda tensors: {**tensors, f"{Q}.lora_A.weight": torch.ones(4, 12)},
        r"q_proj\.lora_A\.weight: found .* \[4, 12\]; expected .* \[2, 12\].*adapter_config\.json",
    ),
    "a tensor less": (
        lambda tensors: {name: tensors[name] for name in tensors if name != f"{Q}.lora_A.weight"},
        r"layers\.1\.self_attn\.q_proj\.lora_A\.weight: found no such tensor",
    ),
    "one tensor twice": (
        lambda tensors: {**tensors, f"{Q}.lora_A.default.weight": torch.ones(2, 12)},
        "found a second tensor for",
    ),
    "integers": (
        lambda tensors: {**tensors, f"{Q}.lora_A.weight": torch.ones(2, 12).int()},
        r"found torch\.int32",
    ),
    "far more than an adapter": (
        lambda tensors: {**tensors, "x": torch.ones(1 << 20)},
        f"{WEIGHTS_FILE}: found .* bytes of tensors",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_file_that_does_not_fit_is_refused_with_what_does(misfit: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama", tie_word_embeddings=False))
    adapter = saved(base, tmp_path / "adapter")
    change, told = MISFITS[misfit]
    rewritten(adapter, change)
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(base, adapter=Adapter(config=adapter))


def test_two_values_of_a_tied_weight_are_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama", tie_word_embeddings=True))
    adapter = saved(base, tmp_path / "adapter")
    rewritten(
        adapter,
        lambda tensors: {**tensors, EMBEDDING: torch.ones(40, 12), HEAD: torch.zeros(40, 12)},
    )
    with pytest.raises(CheckpointError, match=r"found other values than in .*one weight"):
        open_checkpoint(base, adapter=Adapter(config=adapter))


HEADS: list[tuple[str, str, Any, str]] = [
    ("sequence-classification", "SEQ_CLS", AutoModelForSequenceClassification, "score.weight"),
    ("question-answering", "QUESTION_ANS", AutoModelForQuestionAnswering, "qa_outputs.weight"),
]


@pytest.mark.parametrize(("head", "task", "auto", "copied"), HEADS)
def test_the_head_of_a_task_is_trained_whole_as_in_peft(
    head: str, task: str, auto: Any, copied: str, tmp_path: Path
) -> None:
    """Peft adds it to ``modules_to_save``, under every name that it has in any model."""
    config = small_config("llama", pad_token_id=0)
    base = save_model(tmp_path / "base", config, auto_class=auto)
    adapter = saved(base, tmp_path / "adapter", auto, task_type=task)
    assert len(json.loads((adapter / "adapter_config.json").read_bytes())["modules_to_save"]) > 0
    labels = {"labels": torch.tensor([1, 0])}
    if task == "QUESTION_ANS":
        labels = {"start_positions": torch.tensor([1, 0]), "end_positions": torch.tensor([3, 2])}
    rows = {name: value for name, value in make_batch(40, [7, 5]).items() if name != "labels"}
    rows |= labels
    expected = loss_in_peft(base, adapter, rows, auto)
    assert loss_of(base, adapter, rows, head=head) == expected
    new = peft.LoraConfig(r=2, task_type=task, target_modules=["q_proj"])
    opened: Any = open_checkpoint(base, adapter=Adapter(config=new), head=head)
    assert f"{PREFIX}{copied}" in opened.adapter.parameters.values()
    causal = save_model(tmp_path / "causal", small_config("llama"))
    with pytest.raises(CheckpointError, match=rf"task_type: {task}, whose .*--head"):
        loss_of(causal, adapter, make_batch(40, [7, 5]))
    with pytest.raises(OptionError, match=r"adapter\.task_type.*--head"):
        open_checkpoint(causal, adapter=Adapter(config=new))
