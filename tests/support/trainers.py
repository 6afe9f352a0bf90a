"""Hugging Face's trainers in tests: rows, and options for a few steps on the CPU, without files."""

from pathlib import Path
from typing import Any

import pytest
from models import make_batch, small_config

VOCABULARY = small_config("llama").vocab_size
ROWS: Any = [
    {key: value[0] for key, value in make_batch(VOCABULARY, [5], seed=seed).items()}
    for seed in range(12)
]
OF_TRL = [
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("own_cache"),
]


class Smoothed:
    """A trainer's loss of its own: with a term for the tokens that are not the right one."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0.1 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def trainer_options(output: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of ``TrainingArguments`` and of TRL's configs for six steps of two rows."""
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        **changes,
    }
