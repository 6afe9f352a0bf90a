"""Rounded-away updates: the share of stored weights that an update changes. The other weights round back to their value.

A sample of each segment is copied during the sweep. Once the step's update is known, it is applied to the copies along
directions of the same distribution but of other seeds: so no direction is drawn twice or kept, and the run does not depend
on the sample. Changes by the rounding of perturbations or by weight decay do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from zo2core.kernels import Distribution, apply, fill
from zo2core.protocols import CounterNoise, NoiseGenerator, Store
from zo2core.types import Descend, ParameterSpec, Program, Update

EVERY = 100  # steps from one measurement to the next
SAMPLED = 256  # evenly spread elements of a segment; a few more if it has many parameters


class UpdateLoss:
    """Measures the share of weights that an update changes, at the first step and then at every hundredth."""

    def __init__(self, noise: NoiseGenerator) -> None:
        self._distribution = noise.distribution if isinstance(noise, CounterNoise) else Distribution.GAUSSIAN
        self._next = 0  # the next step to measure
        self._is_sampling = False  # whether the present step is measured
        self._samples: dict[int, list[torch.Tensor]] = {}  # by segment

    def begin(self, step: int) -> None:
        """Prepare for a step's sweep."""
        self._is_sampling, self._samples = step >= self._next, {}

    def sample(self, index: int, store: Store, specs: Sequence[ParameterSpec] | None = None) -> None:
        """Copy a few elements of a segment, if the present step is measured. The host does not wait for the device."""
        if not self._is_sampling:
            return
        dtypes = [parameter.dtype for parameter in store]
        if specs is not None:
            pairs = [(theta, spec) for theta, spec in zip(store, specs, strict=False) if not spec.frozen]
            store, dtypes = [theta for theta, _ in pairs], [_kept_dtype(spec) for _, spec in pairs]
            if any(theta.dtype not in (spec.dtype, dtype) for (theta, spec), dtype in zip(pairs, dtypes, strict=True)):
                return
        stride = max(1, sum(parameter.numel() for parameter in store) // SAMPLED)
        self._samples[index] = [
            parameter[::stride].to(dtype, copy=True)
            for parameter, dtype in zip(store, dtypes, strict=False)  # a store of 8-bit weights ends with their scales
            if dtype.itemsize > 1
        ]

    @torch.inference_mode()
    def share_applied(self, update: Update) -> float | None:
        """Return the share of sampled weights that the step's update changes."""
        samples, self._samples = self._samples, {}
        if not samples or not update.lr or not any(update.projected_grads):
            return None
        self._next, self._is_sampling = update.step + EVERY, False
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for copies in samples.values():
            for copy in copies:
                by_dtype[copy.dtype].append(copy.cpu())
        changed = sum(self._changed(torch.cat(copies), update) for copies in by_dtype.values())
        return changed / sum(copy.numel() for copies in by_dtype.values() for copy in copies)

    def _changed(self, before: torch.Tensor, update: Update) -> int:
        """Count the weights that an update along directions of this distribution changes."""
        after, memory = before.clone(), [torch.empty_like(before) for _ in range(2)]
        for direction, grad in enumerate(update.projected_grads):
            z = torch.empty_like(before)
            fill(z, self._distribution, direction, 0)
            apply(after, _step(grad, update.lr), [z], scratch=memory[0], decay_scratch=memory[1])
        return int((after != before).sum())


def _kept_dtype(spec: ParameterSpec) -> torch.dtype:
    """The dtype in which a parameter is kept from step to step."""
    return spec.transfer_dtype if spec.transfer_dtype is not None and spec.transfer_back else spec.dtype


def _step(grad: float, lr: float) -> Program:
    return Program((0,), (Descend(0, grad, lr, 0.0),))
