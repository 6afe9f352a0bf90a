"""How large a step may be that leaves anything of a model."""

from __future__ import annotations

from dataclasses import dataclass

from zo2core import OptionError

# Note: Largest steps. An update moves a weight by lr times the projected gradient, which for a pre-trained model is between
# 0.1 and 1000, and weights are below 1. What is used lies between 1e-8 and 1e-2. Beyond 1 one step leaves nothing of a
# model, however its loss turns out; the same holds of a perturbation by more than the weights themselves.
LARGEST_LR = 1.0
LARGEST_EPS = 1.0


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """How far a step moves the weights."""

    lr: float = 1e-6
    """Peak learning rate. MeZO's range for full fine-tuning of OPT is 1e-7 to 1e-6; small models take more."""
    zo_eps: float = 1e-3
    """Perturbation scale: evaluations are made at the weights plus and minus zo_eps times a random direction."""
    weight_decay: float = 0.0
    """Weight decay of MeZO's update; biases and layer norms do not decay."""

    def require_sane(self) -> None:
        """Refuse numbers with which a single step leaves nothing of a model.

        Raises:
            OptionError: naming the option, and why.
        """
        for option, value, most, why in (
            ("lr", self.lr, LARGEST_LR, "an update moves each weight by lr times the projected gradient"),
            ("zo_eps", self.zo_eps, LARGEST_EPS, "weights are perturbed by this much, and are mostly smaller"),
            ("weight_decay", self.weight_decay, 1 / self.lr, "a step takes lr times weight_decay of a weight away"),
        ):
            if value > most:
                expected = f"at most {most:g}: {why}"
                raise OptionError(option, found=repr(value), expected=expected, remedy=f"lower `{option}`")
