"""Whether updates land: the share of stored weights that an update changes. Those it does not move far enough round back.

A sample of every segment is copied while its bytes pass. Once the step's update is known, it is applied to the copies along
directions of the same distribution, not of the same seed: so nothing has to be drawn twice or kept, and no bit of the run
depends on it. What the rounding of MeZO's walk changes does not count, nor does weight decay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from zo2core.kernels import Distribution, apply, fill
from zo2core.protocols import CounterNoise, NoiseGenerator, Store
from zo2core.types import Descend, ParameterSpec, Program, Update

EVERY = 100  # steps from one look to the next
SAMPLED = 256  # elements of a segment, evenly spread over it; a few more where it has many parameters


class UpdateLoss:
    """Looks at the first step, and then at every hundredth, how much of an update lands.

    Args:
        noise: Whose directions the run moves along.
    """

    def __init__(self, noise: NoiseGenerator) -> None:
        self._distribution = noise.distribution if isinstance(noise, CounterNoise) else Distribution.GAUSSIAN
        self._next = 0  # first step that is looked at
        self._looks = False  # at the present one
        self._samples: dict[int, list[torch.Tensor]] = {}  # by segment

    def begin(self, step: int) -> None:
        """Prepare for a step's sweep."""
        self._looks, self._samples = step >= self._next, {}

    def sample(self, index: int, store: Store, specs: Sequence[ParameterSpec] | None = None) -> None:
        """Copy a few elements of a segment, if the present step is looked at. The host does not wait for the device.

        Args:
            index: The segment.
            store: The segment's own parameters. Rounded copies are skipped: the host samples the weights that they are made
                from.
            specs: Theirs, and in what they are kept from step to step; None: as they are. Frozen ones are passed over, and
                so is what is kept in 8 bits: there it depends on a row's largest weight which updates land.
        """
        if not self._looks:
            return
        kept = [parameter.dtype for parameter in store]
        if specs is not None:
            pairs = [(own, spec) for own, spec in zip(store, specs, strict=False) if not spec.frozen]
            store, kept = [own for own, _ in pairs], [_kept_dtype(spec) for _, spec in pairs]
            if any(own.dtype not in (spec.dtype, dtype) for (own, spec), dtype in zip(pairs, kept, strict=True)):
                return
        stride = max(1, sum(parameter.numel() for parameter in store) // SAMPLED)
        self._samples[index] = [
            parameter[::stride].to(dtype, copy=True)
            for parameter, dtype in zip(store, kept, strict=False)  # behind what is carried in 8 bits there are scales
            if dtype.itemsize > 1
        ]

    @torch.inference_mode()
    def share_applied(self, update: Update) -> float | None:
        """The share of sampled weights that the step's update changes.

        Returns:
            From 0 to 1; None if the step was not looked at, or its update is none. Then the next step is.
        """
        samples, self._samples = self._samples, {}
        if not samples or not update.lr or not any(update.projected_grads):
            return None
        self._next, self._looks = update.step + EVERY, False
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for copies in samples.values():
            for copy in copies:
                by_dtype[copy.dtype].append(copy.cpu())
        changed = sum(self._changed(torch.cat(copies), update) for copies in by_dtype.values())
        return changed / sum(copy.numel() for copies in by_dtype.values() for copy in copies)

    def _changed(self, before: torch.Tensor, update: Update) -> int:
        """How many weights an update along directions of this distribution changes."""
        after, memory = before.clone(), [torch.empty_like(before) for _ in range(2)]
        for direction, grad in enumerate(update.projected_grads):
            z = torch.empty_like(before)
            fill(z, self._distribution, direction, 0)
            apply(after, _step(grad, update.lr), [z], scratch=memory[0], decay_scratch=memory[1])
        return int((after != before).sum())


def _kept_dtype(spec: ParameterSpec) -> torch.dtype:
    return spec.transfer_dtype if spec.transfer_dtype is not None and spec.transfer_back else spec.dtype


def _step(grad: float, lr: float) -> Program:
    return Program((0,), (Descend(0, grad, lr, 0.0),))
