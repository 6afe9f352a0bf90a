"""TRL's GRPO over streamed blocks: with the same completions, the bits of its trainer on peft's whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import WORDS, save_model, save_tokenizer, small_config
from peft_models import lora, monolithic, values_of
from trainers import OF_TRL, trainer_options

from zo2adapters import Adapter, BackpropGRPOMixin, BackpropTrainerMixin, open_checkpoint
from zo2adapters.tasks.generation import Generation, Sampling
from zo2core import Engine, FirstOrder, HostPlan, MemoryPolicy
from zo2core.errors import OptionError

datasets = pytest.importorskip("datasets")
peft: Any = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

pytestmark = OF_TRL

NOUNS = WORDS[3:]
ONE_BLOCK = MemoryPolicy(host=HostPlan((), 1 << 40, 1, keep_noise=False), activations="16MiB")
PROMPTS = [{"prompt": " ".join(NOUNS[i % 5 : i % 5 + 1 + i % 3])} for i in range(8)]


class FirstOrderGRPOTrainer(BackpropGRPOMixin, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
    pass


def cats(completions: list[str], **_: Any) -> list[float]:
    return [float(text.split().count("cat")) - 0.1 * len(text) for text in completions]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_model(tmp_path_factory.mktemp("grpo") / "base", small_config("llama", vocab_size=len(WORDS)))
    save_tokenizer(directory)
    return directory


def opened(base: Path) -> Any:
    return open_checkpoint(base, adapter=Adapter(config=lora(), seed=5))


def made(kind: type[Any], model: Any, output: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 5,
        "max_steps": 4,
        "learning_rate": 3e-2,
        "gradient_checkpointing": False,
        "temperature": 1.5,
        **changes,
    }
    options = {"memory": ONE_BLOCK} if issubclass(kind, BackpropTrainerMixin) else {}
    rows = datasets.Dataset.from_list(PROMPTS)
    args = trl.GRPOConfig(**trainer_options(output, **given))
    return kind(model=model, args=args, reward_funcs=cats, train_dataset=rows, eval_dataset=rows.select(range(4)), **options)


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2, "loss_type": "grpo"}], ids=str)
def test_grpo_with_the_same_completions_has_the_bits_of_trls_trainer(
    base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    ours = made(FirstOrderGRPOTrainer, opened(base), tmp_path / "run", **changes)
    written: list[list[list[int]]] = []
    own = ours._generate_single_turn

    def kept(*arguments: Any, **options: Any) -> Any:
        completions, rest = own(*arguments, **options)
        written.append(completions)
        return completions, rest

    ours._generate_single_turn = kept
    ours.train()
    resident = monolithic(base, lora(), values_of(opened(base)), ())
    resident.train(mode=False)
    stock = made(trl.GRPOTrainer, resident, tmp_path / "stock", **changes)
    replayed = iter(written)
    stock._generate_single_turn = lambda *_, **__: (next(replayed), None)
    stock.train()
    trained = dict(stock.model.named_parameters())
    for name, value in ours.engine.parameters.items():
        same = trained[name if name in trained else f"base_model.model.{name}"]
        assert torch.equal(value, same), name
    rows = [[row for row in trainer.state.log_history if "loss" in row] for trainer in (ours, stock)]
    assert len(rows[0]) == 4
    assert len({row["reward"] for row in rows[0]}) > 1
    for key in ("loss", "grad_norm", "reward", "reward_std", "entropy", "completions/mean_length", "num_tokens"):
        assert [row[key] for row in rows[0]] == [row[key] for row in rows[1]], key
    assert any(row["grad_norm"] for row in rows[0])


def test_completions_are_those_of_the_present_adapter(base: Path, tmp_path: Path) -> None:
    trainer = made(FirstOrderGRPOTrainer, opened(base), tmp_path / "run", max_steps=2)
    trainer.train()
    prompts = [[3, 4], [5]]
    written, _ = trainer._generate_single_turn(prompts, None, {}, 2)
    trainer.save_model(tmp_path / "saved")
    model = open_checkpoint(base, adapter=Adapter(config=tmp_path / "saved"))
    with Engine(model, FirstOrder(None)) as engine:
        sampling = Sampling(temperature=1.5, seed=trainer.args.seed + 2)
        again = Generation(
            engine, model, max_new_tokens=5, sampling=sampling, eos_token_ids=trainer.eos_token_ids, pad_token_id=0
        ).continuations(prompts)
    assert [written] == again


def test_evaluation_generates_for_each_batch(base: Path, tmp_path: Path) -> None:
    trainer = made(FirstOrderGRPOTrainer, opened(base), tmp_path / "run", per_device_eval_batch_size=4)
    result = trainer.evaluate()
    assert {"eval_loss", "eval_reward"} <= result.keys()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_vllm": True}, "use_vllm"),
        ({"beta": 0.1}, "beta"),
        ({"num_iterations": 2}, "num_iterations"),
        ({"steps_per_generation": 4}, "steps_per_generation"),
        ({"top_k": 5}, "top_k"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
def test_what_needs_the_whole_model_is_refused_by_name(
    base: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(OptionError, match=f"^{named}: "):
        made(FirstOrderGRPOTrainer, opened(base), tmp_path / "run", **changes)


def test_the_other_mixins_name_the_one_for_grpo(base: Path, tmp_path: Path) -> None:
    class Plain(BackpropTrainerMixin, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        pass

    class Misplaced(BackpropGRPOMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        pass

    with pytest.raises(OptionError, match="BackpropGRPOMixin"):
        made(Plain, opened(base), tmp_path / "run")
    with pytest.raises(OptionError, match="one of TRL's GRPOTrainer"):
        Misplaced(model=opened(base), args=trl.SFTConfig(output_dir=str(tmp_path), bf16=False, report_to=[]))
