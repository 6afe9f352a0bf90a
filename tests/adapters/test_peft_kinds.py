"""Kinds of adapters: one row each in a table, and what every kind has to hold.

Monolithic MeZO's bits on peft's own model, peft's files, first values by peft's own code, and
refusals by name.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command_lines import done
from engines import check_held_bytes, memory
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, batches, make_batch, save_model, small_config
from parity import Plan, Storage, assert_parity, plans, storages
from peft_models import (
    copies_of_ends,
    dora,
    ends,
    hra,
    ia3,
    in_lora,
    loha,
    lokr,
    miss,
    modules_to_save,
    prefix,
    rslora,
    steps,
    tokens,
    tokens_alone,
    vera,
)
from profiles import each_choice, examples
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from zo2adapters import Adapter, HFBlockModel, open_checkpoint
from zo2adapters.models.batches import pack
from zo2adapters.models.conversion import quantize
from zo2adapters.models.export import export_merged
from zo2adapters.models.peft_model import LayerPrefix
from zo2adapters.tasks.generation import generate
from zo2core import Engine, FirstOrder, LowRankPerturbation, MeZOSGD, ZerothOrder
from zo2core.errors import (
    BatchError,
    CheckpointError,
    JournalError,
    OptionError,
    OutputError,
    UnsupportedModelError,
)

peft: Any = pytest.importorskip("peft")
TARGETS = ("opt", "llama")
FILES = {"adapter_config.json", "adapter_model.safetensors", "generation_config.json"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),  # peft asks for it
    # save or load projections: peft's remark
    pytest.mark.filterwarnings("ignore:Specified to not"),
    # peft saves the base's embeddings beside their adapters
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]


class Kind(NamedTuple):
    config: Callable[..., Any]  # of the model's type and of changes
    insert: Callable[[nn.Module, Any], nn.Module]  # peft's own model around a whole one
    other: Mapping[str, Any]  # a change that makes it another adapter
    frozen: str  # a part of some parameters' names, but not of all; empty: there is one parameter
    is_drawn: bool = True  # whether initial values depend on the seed


def wrapped(whole: nn.Module, config: Any) -> nn.Module:
    model: nn.Module = peft.get_peft_model(whole, config).get_base_model()
    return model


class PlainNames(nn.Module):
    """Peft's model around a whole one, whose parameters have the names that they have in it."""

    def __init__(self, wrapper: nn.Module) -> None:
        super().__init__()
        self.wrapper = wrapper

    def forward(self, **batch: torch.Tensor) -> Any:
        with warnings.catch_warnings():
            # peft's own call of transformers
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated")
            return self.wrapper(**batch)

    def named_parameters(
        self, *arguments: Any, **options: Any
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.wrapper.named_parameters():
            yield name.removeprefix("base_model."), parameter


def around(whole: nn.Module, config: Any) -> nn.Module:
    return PlainNames(peft.get_peft_model(whole, config))


KINDS = {
    "lora": Kind(in_lora, wrapped, {"lora_alpha": 8}, "lora_A"),
    "rslora": Kind(rslora, wrapped, {"r": 2}, "lora_A"),
    "dora": Kind(dora, wrapped, {"lora_alpha": 8}, "lora_A"),
    "prefix": Kind(prefix, around, {"num_virtual_tokens": 4}, ""),
    "ia3": Kind(ia3, wrapped, {"feedforward_modules": []}, "q_proj"),
    "loha": Kind(loha, wrapped, {"alpha": 8}, "hada_w1_a"),
    "modules_to_save": Kind(modules_to_save, wrapped, {"modules_to_save": None}, "lora_A"),
    "ends": Kind(ends, wrapped, {"lora_alpha": 8}, "lora_A"),
    "copies of ends": Kind(copies_of_ends, wrapped, {"modules_to_save": None}, "lora_A"),
    "tokens": Kind(tokens, wrapped, {"trainable_token_indices": [5, 8]}, "lora_A"),
    "tokens alone": Kind(tokens_alone, wrapped, {"token_indices": [5, 8]}, "", is_drawn=False),
    "lokr": Kind(lokr, wrapped, {"alpha": 8}, "lokr_w1"),
    "hra": Kind(hra, wrapped, {"apply_GS": True}, "q_proj"),
    "vera": Kind(vera, wrapped, {"projection_prng_key": 1}, "vera_lambda_d"),
    "miss": Kind(miss, wrapped, {"r": 1}, "q_proj"),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def values_of(model: Any) -> dict[str, torch.Tensor]:
    """An adapter's first values, as the model has them."""
    values = {name: torch.empty(tensor.shape) for name, tensor in model.adapter.tensors.items()}
    for name, value in values.items():
        model.weights.read_into(name, value.view(-1))
    return values


def whole_model(base: Path, kind: Kind, config: Any) -> nn.Module:
    """Peft's own model, with peft's own first values."""
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    whole.config.use_cache = False
    return kind.insert(whole, config).eval()


def set_values(
    whole: nn.Module, values: Mapping[str, torch.Tensor], frozen: tuple[str, ...] = ()
) -> None:
    """Give peft's own model an adapter's values, and have it train those that are not frozen."""
    names = set()
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = name in values and not any(part in name for part in frozen)
        if name in values:
            parameter.data = values[name].to(parameter.dtype, copy=True)
            names.add(name)
    assert names == set(values)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        *(
            pytest.param(kind, model_type, id=f"{name}-{model_type}")
            for name, kind in KINDS.items()
            for model_type in TARGETS
        ),
        *(
            pytest.param(KINDS[name], model_type, id=f"{name}-{model_type}")
            for name in ("prefix", "lora", "rslora")
            for model_type in ("qwen2", "qwen3")
        ),
    ],
)
@examples(short=2, long=16)
@given(
    data=st.data(),
    plan=plans(),
    storage=storages,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    is_partly_frozen=st.booleans(),
)
def test_every_kind_in_the_weights_is_monolithic_mezo(
    kind: Kind,
    model_type: str,
    data: st.DataObject,
    plan: Plan,
    storage: Storage,
    dtype: torch.dtype,
    is_partly_frozen: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tmp = tmp_path_factory.mktemp("kind")
    config = data.draw(CONFIGS[model_type])
    config.max_position_embeddings += 3  # a prefix takes as many
    batch = data.draw(batches(config.vocab_size))
    base = save_model(tmp / "base", config, dtype)
    frozen = (kind.frozen,) if kind.frozen and is_partly_frozen else ()
    adapter = Adapter(config=kind.config(model_type), frozen=frozen, seed=1)
    storage = storage._replace(write_back_every=None)

    def make() -> Engine:
        return storage.engine(open_checkpoint(base, adapter=adapter), plan, tmp)

    whole = whole_model(base, kind, adapter.config)
    set_values(whole, values_of(open_checkpoint(base, adapter=adapter)), frozen)
    assert_parity(make, whole, plan, batch).close()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "dtype"), each_choice(list(KINDS), [torch.float32, torch.bfloat16])
)
def test_every_kind_goes_to_peft_and_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind = KINDS[name]
    base = save_model(tmp_path / "base", small_config("llama"), dtype)
    batch = make_batch(40, [7, 5])
    adapter = Adapter(config=kind.config("llama"))
    with Engine(
        open_checkpoint(base, adapter=adapter), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2))
    ) as engine:
        engine.step(batch)
        engine.export(tmp_path / "adapter")
        loss = engine.evaluate([batch]).loss
        with pytest.raises(OutputError):
            engine.export(tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == FILES
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    assert loaded(**batch, use_cache=False).loss.item() == loss
    loaded.save_pretrained(tmp_path / "theirs")
    for saved in ("adapter", "theirs"):
        with Engine(open_checkpoint(base, adapter=Adapter(config=tmp_path / saved))) as replayer:
            assert replayer.evaluate([batch]).loss == loss
            replayer.export(tmp_path / f"{saved} again")
        again = load_file(tmp_path / f"{saved} again" / "adapter_model.safetensors")
        for key, value in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items():
            assert torch.equal(again[key], value)
    if name != "prefix":  # which no weight can contain
        done(
            "merge",
            "--model",
            base,
            "--adapter",
            tmp_path / "adapter",
            "--output",
            tmp_path / "merged",
        )
        loaded.merge_and_unload().save_pretrained(tmp_path / "peft")
        before, ours, theirs = (
            load_file(tmp_path / path / "model.safetensors") for path in ("base", "merged", "peft")
        )
        assert ours.keys() == theirs.keys()
        assert all(
            torch.equal(value, theirs[key]) and value.dtype is dtype for key, value in ours.items()
        )
        assert any(not torch.equal(value, before[key]) for key, value in ours.items()), (
            "the adapter changes weights"
        )


@pytest.mark.few(2)
@every_kind
def test_a_run_goes_on_with_the_same_adapter_of_its_kind_only(
    kind: Kind, base: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.jsonl"

    def opened() -> HFBlockModel:
        return open_checkpoint(base, adapter=Adapter(config=kind.config("llama")))

    expected = steps(opened(), 4)
    begun = steps(opened(), 2, journal=journal)
    others = [
        Adapter(config=kind.config("llama", **kind.other)),
        None,
    ]
    others += [Adapter(config=kind.config("llama"), seed=1)] if kind.is_drawn else []
    others += [Adapter(config=kind.config("llama"), frozen=(kind.frozen,))] if kind.frozen else []
    for other in others:
        with pytest.raises(JournalError):
            steps(open_checkpoint(base, adapter=other), 1, journal=journal)
    assert begun + steps(opened(), 2, journal=journal) == expected


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [tokens, tokens_alone])
@pytest.mark.parametrize("is_tied", [True, False])
def test_trained_tokens_have_the_gradients_of_pefts_and_are_merged(
    is_tied: bool, make: Callable[..., Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config("llama", tie_word_embeddings=is_tied))
    # rows that were added to the embedding
    grown = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    grown.resize_token_embeddings(42, mean_resizing=False)
    grown.save_pretrained(base)
    option = "trainable_token_indices" if make is tokens else "token_indices"
    config = make("llama", **{option: [41, 5]})
    batch = make_batch(42, [7, 5])
    batch["input_ids"][0, 1:4] = torch.tensor([41, 5, 41])
    batch["labels"][0, 1:4] = batch["input_ids"][0, 1:4]
    model: Any = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
    with Engine(model, FirstOrder(partial(torch.optim.SGD, lr=1e-1))) as engine:
        first = {name: value.detach().clone() for name, value in engine.parameters.items()}
        whole = wrapped(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), config).eval()
        set_values(whole, first)
        optimizer = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=1e-1)
        for _ in range(3):
            loss = whole(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert engine.step(batch).loss == loss.item()
        trained = dict(whole.named_parameters())
        assert all(torch.equal(value, trained[name]) for name, value in engine.parameters.items())
        [rows] = [name for name in first if "trainable_tokens_delta" in name]
        # each forward copies the embedding
        assert model.adapter.forward_bytes == 42 * 12 * dtype.itemsize
        assert not torch.equal(first[rows], trained[rows])
        expected = engine.evaluate([batch]).loss
        export_merged(engine, model, tmp_path / "merged")
    with Engine(open_checkpoint(tmp_path / "merged")) as replayer:
        assert replayer.evaluate([batch]).loss == pytest.approx(expected, rel=1e-2)
    merged = load_file(tmp_path / "merged" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(merged[[41, 5]], trained[rows].detach().to(dtype))


@pytest.mark.parametrize(
    ("wrong", "found"),
    [([40], "found 40"), ([-1], "found -1"), ([5, 5], "a token twice"), ([], "no token")],
)
def test_tokens_that_the_base_does_not_have_are_refused(
    wrong: list[int], found: str, base: Path
) -> None:
    for config in (
        tokens("llama", trainable_token_indices=wrong),
        tokens_alone("llama", token_indices=wrong),
    ):
        with pytest.raises(OptionError, match=rf"token_indices: .*{found}"):
            open_checkpoint(base, adapter=Adapter(config=config))


DAMAGES = [
    "another base",
    "a tensor less",
    "another shape",
    "cut short",
    "no file",
    "no JSON",
]


@pytest.mark.parametrize(("name", "damage"), each_choice(list(KINDS), DAMAGES))
def test_an_adapter_of_any_kind_that_does_not_fit_is_refused(
    name: str, damage: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    base, adapter = save_model(tmp_path / "base", small_config("llama")), tmp_path / "adapter"
    with Engine(open_checkpoint(base, adapter=Adapter(config=kind.config("llama")))) as replayer:
        replayer.export(adapter)
    weights = adapter / "adapter_model.safetensors"
    if damage == "another base":
        base = save_model(
            tmp_path / "other", small_config("llama", intermediate_size=28, num_hidden_layers=3)
        )
    elif damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:-3])
    elif damage == "no file":
        weights.unlink()
    elif damage == "no JSON":
        (adapter / "adapter_config.json").write_text("{")
    else:
        tensors = load_file(weights)
        if damage == "a tensor less":
            del tensors[min(tensors)]
        else:
            tensors[max(tensors)] = torch.zeros(1, 7)
        save_file(tensors, weights)
    with pytest.raises(CheckpointError) as info:
        open_checkpoint(base, adapter=Adapter(config=adapter))
    assert str(adapter) in str(info.value)


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("zo2core.checkpoint.shards.SafetensorsReader.read_into", refuse)


@pytest.mark.parametrize(
    "kind", [kind for name, kind in KINDS.items() if name not in ("lora", "rslora")]
)
@pytest.mark.usefixtures("nothing_is_read")
def test_what_cannot_be_beside_the_activations_is_refused_before_anything_is_read(
    kind: Kind, tmp_path: Path
) -> None:
    model = open_checkpoint(
        save_model(tmp_path / "base", small_config("llama")),
        adapter=Adapter(config=kind.config("llama")),
    )
    with pytest.raises(
        UnsupportedModelError, match=r"^adapter: found .* with low-rank perturbations"
    ):
        Engine(
            model,
            ZerothOrder(
                MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False),
                perturbation=LowRankPerturbation(rank=2),
            ),
            journal=tmp_path / "journal.jsonl",
        )
    assert not (tmp_path / "journal.jsonl").exists()


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "method"), each_choice(list(KINDS), ["int8", "nf4"]))
def test_every_kind_on_a_quantised_base_is_that_on_the_dequantised_one(
    name: str, method: str, tmp_path: Path
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    save_model(tmp_path / "base", small_config("llama", **sizes), torch.bfloat16)
    quantize(tmp_path / "base", tmp_path / method, method)
    with Engine(open_checkpoint(tmp_path / method)) as replayer:
        replayer.export(tmp_path / "plain")
    drawn = Adapter(config=KINDS[name].config("llama"), seed=2)
    with Engine(open_checkpoint(tmp_path / "plain", adapter=drawn)) as beginner:
        beginner.export(tmp_path / "adapter")
    # saved, since peft rounds what it draws to the dtype of weights that are not encoded
    adapter = Adapter(config=tmp_path / "adapter")
    plain = open_checkpoint(tmp_path / "plain", adapter=adapter)
    encoded = open_checkpoint(tmp_path / method, adapter=adapter)
    assert steps(encoded, memory=memory(1)) == steps(plain)


DRAWN: dict[str, Callable[..., Any]] = {
    "lora": in_lora,
    "lora, matrices that are not zero": partial(in_lora, init_lora_weights=False),
    "lora, gaussian": partial(in_lora, init_lora_weights="gaussian"),
    "dora": dora,
    "loha": partial(loha, init_weights=True),
    **{name: KINDS[name].config for name in ("ia3", "lokr", "hra", "miss")},
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in DRAWN), ("lora", torch.bfloat16), ("lokr", torch.float16)],
)
def test_first_values_are_those_that_peft_draws_from_the_same_seed(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    base, config = save_model(tmp_path, small_config("llama"), dtype), DRAWN[kind]
    state = torch.random.get_rng_state()
    adapter = Adapter(config=config("llama"), seed=4)
    values = values_of(open_checkpoint(base, adapter=adapter))
    assert torch.equal(torch.random.get_rng_state(), state), "the generator of the host is its own"
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    torch.manual_seed(4)
    theirs = dict(wrapped(whole, config("llama")).named_parameters())
    assert len(values) >= 4
    for name, value in values.items():
        assert theirs[name].dtype == torch.float32
        assert torch.equal(value, theirs[name]), name


def test_magnitudes_begin_as_pefts_and_are_norms_of_weights_and_matrices_together(
    tmp_path: Path,
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        base = save_model(tmp_path / str(dtype), small_config("llama"), dtype)
        values = values_of(open_checkpoint(base, adapter=Adapter(config=dora("llama"))))
        theirs = dict(whole_model(base, KINDS["dora"], dora("llama")).named_parameters())
        magnitudes = [name for name in values if "magnitude" in name]
        assert len(magnitudes) == 4
        for name in magnitudes:
            assert theirs[name].dtype == torch.float32
            assert torch.equal(values[name], theirs[name]), name
    base = tmp_path / "torch.float32"
    config = dora("llama", init_lora_weights=False, target_modules=["q_proj"])
    values = values_of(open_checkpoint(base, adapter=Adapter(config=config)))
    for number, layer in enumerate(AutoModelForCausalLM.from_pretrained(base).model.layers):
        name = f"model.layers.{number}.self_attn.q_proj.lora_{{}}.default.weight"
        a, b, magnitude = (values[name.format(part)] for part in ("A", "B", "magnitude_vector"))
        weight = layer.self_attn.q_proj.weight + 16 / 3 * (b @ a)
        torch.testing.assert_close(magnitude, weight.norm(dim=1).detach())


def test_a_prefix_begins_as_keys_and_values_of_random_tokens_or_zeros(tmp_path: Path) -> None:
    for model_type in TARGETS:
        base = save_model(tmp_path / model_type, small_config(model_type))
        config = prefix(model_type, init_weights="zero")
        [table] = values_of(open_checkpoint(base, adapter=Adapter(config=config))).values()
        assert table.shape == (3, 2 * 2 * 12)
        assert not table.any()
        for dtype in (torch.float32, torch.bfloat16):
            base = save_model(tmp_path / f"{model_type} {dtype}", small_config(model_type), dtype)
            model = open_checkpoint(base, adapter=Adapter(config=prefix(model_type), seed=6))
            [table] = values_of(model).values()
            ids = torch.randint(40, (1, 3), generator=torch.Generator().manual_seed(6))
            with torch.inference_mode():
                whole: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
                cache: Any = DynamicCache()
                assert model.cache_argument is not None
                whole.eval()(input_ids=ids, use_cache=True, **{model.cache_argument: cache})
            for row, token in enumerate(table.view(3, 2, 2, 12).unbind()):
                for layer, (keys, values) in zip(cache.layers, token.unbind(), strict=True):
                    assert torch.equal(keys, layer.keys[0, :, row].reshape(-1).float())
                    assert torch.equal(values, layer.values[0, :, row].reshape(-1).float())


def test_a_new_prefix_is_random_tokens_before_each_row(tmp_path: Path) -> None:
    base = save_model(
        tmp_path / "base", small_config("llama", num_attention_heads=6, num_key_value_heads=3)
    )
    model = open_checkpoint(base, adapter=Adapter(config=prefix("llama"), seed=6))
    batch = make_batch(40, [7, 5])
    with Engine(model) as replayer:
        loss = replayer.evaluate([batch]).loss
    ids = torch.randint(40, (1, 3), generator=torch.Generator().manual_seed(6)).expand(2, -1)
    longer = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.full_like(ids, -100),
    }
    with Engine(open_checkpoint(base)) as replayer:
        before = {key: torch.cat([value, batch[key]], dim=1) for key, value in longer.items()}
        assert replayer.evaluate([before]).loss == pytest.approx(loss, rel=1e-6)
        assert replayer.evaluate([batch]).loss != pytest.approx(loss, rel=1e-3)


def test_every_call_of_a_layer_has_a_cache_of_its_own(tmp_path: Path) -> None:
    base = save_model(tmp_path, small_config("llama"))
    model = open_checkpoint(base, adapter=Adapter(config=prefix("llama")))
    batch = make_batch(40, [7, 5])
    with Engine(model) as replayer:
        once = replayer.evaluate([batch]).losses
        assert replayer.evaluate([batch, batch]).losses == once * 2
        prepared = model.prepared(batch)
        with torch.inference_mode():
            activations = model.embed(prepared)
            first, second = model.block(0, activations), model.block(0, activations)
        assert torch.equal(first.hidden, second.hidden)
        held = [
            value for value in first.calls.layer(0)[1].values() if isinstance(value, LayerPrefix)
        ]
        assert [own.keys.shape for own in held] == [(1, 3, 3, 4)]


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", TARGETS)
def test_what_a_batch_with_a_prefix_holds_is_known_ahead(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    base = save_model(tmp_path, small_config(model_type), dtype)
    model = open_checkpoint(base, adapter=Adapter(config=prefix(model_type)))
    with Engine(model):
        for lengths in ([9], [2], [9, 9], [9, 4], [9, 3, 5, 2]):
            check_held_bytes(model, model, make_batch(40, lengths))


@pytest.mark.parametrize("model_type", TARGETS)
def test_text_is_generated_behind_a_prefix_as_by_pefts_forward(
    model_type: str, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config(model_type, max_position_embeddings=40))
    model = open_checkpoint(base, adapter=Adapter(config=prefix(model_type)))
    prompts = [[5, 9, 11, 7], [8, 3]]
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2))) as engine:
        engine.step(make_batch(40, [7, 5]))
        engine.export(tmp_path / "adapter")
        ours = [
            list(row)
            for row in zip(*generate(engine, model, prompts, max_new_tokens=8), strict=True)
        ]
        again = [
            list(row)
            for row in zip(*generate(engine, model, prompts, max_new_tokens=8), strict=True)
        ]
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    )
    theirs = PlainNames(loaded.eval())
    for prompt, continuation in zip(prompts, ours, strict=True):
        tokens = list(prompt)
        for _ in range(8):
            ids = torch.tensor([tokens])
            logits = theirs(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            tokens.append(int(logits[0, -1].argmax()))
        assert tokens[len(prompt) :] == continuation
    assert again == ours


@pytest.mark.parametrize("model_type", TARGETS)
def test_branches_recorded_before_a_sweep_are_those_that_it_takes(
    model_type: str, tmp_path: Path
) -> None:
    base, batch = save_model(tmp_path, small_config(model_type)), make_batch(40, [7, 5])
    runs: list[tuple[float, list[Any]]] = []
    for records in (False, True):
        model = open_checkpoint(base, adapter=Adapter(config=prefix(model_type)), loss_chunk=3)
        with Engine(model) as replayer:
            if records:  # as for a GPU
                model.record_branches(model.prepared(batch))
                assert model._stand_in_branches._cached == runs[0][1]
            runs.append((replayer.evaluate([batch]).loss, model._stand_in_branches._cached))
    assert runs[0] == runs[1]


def test_rows_leave_a_prefix_its_positions_and_packed_ones_would_share_it(tmp_path: Path) -> None:
    base = save_model(tmp_path, small_config("opt"))
    model = open_checkpoint(base, adapter=Adapter(config=prefix("opt")))
    model.prepared({**make_batch(40, [7, 2])})
    with pytest.raises(UnsupportedModelError, match="prefix: found several sequences in a row"):
        model.prepared(pack(make_batch(40, [7, 2])))
    with Engine(model) as replayer:
        replayer.evaluate([make_batch(40, [9])])
        with pytest.raises(BatchError, match="at most 9"):
            replayer.evaluate([make_batch(40, [10])])
        with pytest.raises(OptionError, match="max_new_tokens"):
            list(generate(replayer, model, [[5, 6]], max_new_tokens=8))


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (
            partial(dora, modules_to_save=["self_attn"]),
            "adapter.modules_to_save: found .*self_attn",
        ),
        (
            partial(dora, modules_to_save=["layer_norms"]),
            "adapter.modules_to_save: found layer_norms",
        ),
        (partial(dora, r=0), "adapter.r"),
        (partial(prefix, prefix_projection=True), "adapter.prefix_projection"),
        (partial(prefix, num_virtual_tokens=0), "adapter.num_virtual_tokens"),
        (partial(prefix, num_virtual_tokens=None), "adapter.num_virtual_tokens"),
        (partial(prefix, num_virtual_tokens=12), "adapter.num_virtual_tokens"),
        (partial(prefix, num_layers=5), "adapter.num_layers"),
        (partial(prefix, token_dim=24), "adapter.token_dim"),
        (partial(prefix, task_type="SEQ_CLS"), "adapter.task_type"),
        (partial(prefix, modules_to_save=["lm_head"]), "adapter.modules_to_save"),
    ],
)
def test_what_no_kind_heeds_is_refused(
    config: Callable[[str], Any], option: str, tmp_path: Path
) -> None:
    base = save_model(tmp_path, small_config("llama"))
    with pytest.raises(OptionError, match=f"^{option}"):
        open_checkpoint(base, adapter=Adapter(config=config("llama")))


def test_vera_keeps_the_projections_of_its_file_and_draws_them_where_it_has_none(
    base: Path, tmp_path: Path
) -> None:
    batch = make_batch(40, [7, 5])
    drawn, given = tmp_path / "drawn", tmp_path / "given"
    config = vera("llama", projection_prng_key=3, save_projection=False)
    with Engine(open_checkpoint(base, adapter=Adapter(config=config))) as engine:
        engine.export(drawn)
        loss = engine.evaluate([batch]).loss
    tensors = load_file(drawn / "adapter_model.safetensors")
    assert not any("vera_A" in name for name in tensors)
    peft_model = wrapped(AutoModelForCausalLM.from_pretrained(base), config)
    [a, b] = [
        value.clone()
        for name, value in peft_model.named_buffers()
        if name.endswith(("q_proj.vera_A.default", "q_proj.vera_B.default")) and ".0." in name
    ]
    assert (
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), drawn)(
            **batch
        ).loss.item()
        == loss
    )
    model: Any = open_checkpoint(base, adapter=Adapter(config=drawn))
    with Engine(model) as engine:
        assert engine.evaluate([batch]).loss == loss
    assert "constants" not in model.description["adapter"]
    shutil.copytree(drawn, given)
    saved = json.loads((given / "adapter_config.json").read_text())
    (given / "adapter_config.json").write_text(json.dumps({**saved, "save_projection": True}))
    own = {**tensors, "base_model.vera_A": 2 * a, "base_model.vera_B": b}
    save_file(own, given / "adapter_model.safetensors")
    other: Any = open_checkpoint(base, adapter=Adapter(config=given))
    with Engine(other) as engine:
        changed = engine.evaluate([batch]).loss
        engine.export(tmp_path / "again")
    whole = AutoModelForCausalLM.from_pretrained(base)
    assert peft.PeftModel.from_pretrained(whole, given)(**batch).loss.item() == changed != loss
    assert len(other.description["adapter"]["constants"]) == 64, "a run is told apart by them"
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert torch.equal(again["base_model.vera_A"], 2 * a)
    del own["base_model.vera_B"]
    save_file(own, given / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="vera_B of shape None"):
        open_checkpoint(base, adapter=Adapter(config=given))


def test_vera_refuses_other_layers_dropout_and_biases(base: Path, tmp_path: Path) -> None:
    for change, said in (
        ({"vera_dropout": 0.1}, "adapter.vera_dropout"),
        ({"bias": "vera_only"}, "adapter.bias"),
        ({"r": 0}, "adapter.r"),
        ({"projection_prng_key": "x"}, "adapter.projection_prng_key"),
        ({"target_modules": ["norm"]}, "adapter.target_modules"),
    ):
        with pytest.raises(OptionError, match=said):
            open_checkpoint(base, adapter=Adapter(config=vera("llama", **change)))
    gpt2 = save_model(tmp_path / "gpt2", small_config("gpt2"))
    config = peft.VeraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(OptionError, match="Conv1D"):
        open_checkpoint(gpt2, adapter=Adapter(config=config))
