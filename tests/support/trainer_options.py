"""Options of Hugging Face's trainers in tests: a few steps on the CPU, without files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
