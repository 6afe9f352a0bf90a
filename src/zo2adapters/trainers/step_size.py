"""How large a step may be that leaves anything of a model."""

from __future__ import annotations

from zo2core import OptionError

# Note: Largest steps. An update moves a weight by lr times the projected gradient, which for a pre-trained model is between
# 0.1 and 1000, and weights are below 1. What is used lies between 1e-8 and 1e-2. Beyond 1 one step leaves nothing of a
# model, however its loss turns out; the same holds of a perturbation by more than the weights themselves.
LARGEST_LR = 1.0
LARGEST_EPS = 1.0


def require_sane_step(lr: float, zo_eps: float, weight_decay: float) -> None:
    """Refuse numbers with which a single step leaves nothing of a model.

    Raises:
        OptionError: naming the option, and why.
    """
    for option, value, most, why in (
        ("lr", lr, LARGEST_LR, "an update moves each weight by lr times the projected gradient"),
        ("zo_eps", zo_eps, LARGEST_EPS, "weights are perturbed by this much, and are mostly smaller"),
        ("weight_decay", weight_decay, 1 / lr, "a step takes lr times weight_decay of a weight away"),
    ):
        if value > most:
            raise OptionError(option, found=repr(value), expected=f"at most {most:g}: {why}", remedy=f"lower {option}")
