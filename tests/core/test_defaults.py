"""What is chosen where nothing is said: by an engine for its journal, and by a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import make_batch, save_model, small_config
from parity import assert_same_weights

from zo2adapters import open_checkpoint
from zo2adapters.trainers.optimization import Noise, Optimization
from zo2core import Distribution, Engine, MeZOSGD, PhiloxNoise, SequentialNoise, ZerothOrder
from zo2core.errors import OptionError
from zo2core.protocols import NoiseGenerator


@pytest.mark.parametrize("noise", [None, *map(PhiloxNoise, Distribution)], ids=["mezo", "gaussian", "rademacher"])
def test_a_journal_goes_on_with_the_noise_that_it_was_begun_with(noise: NoiseGenerator | None, tmp_path: Path) -> None:
    config = small_config()
    base, batch = save_model(tmp_path / "base", config), make_batch(config.vocab_size, [5, 4])
    path = tmp_path / "journal.jsonl"
    with Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=0.1, zo_eps=0.1), noise=noise), journal=path) as engine:
        engine.step(batch)
        expected = {name: tensor.clone() for name, tensor in engine.parameters_now()}
    with Engine(open_checkpoint(base), journal=path) as engine:
        assert_same_weights(engine.parameters_now(), expected.items())


def test_a_journal_of_ones_own_noise_needs_it_again(tmp_path: Path) -> None:
    class Own(PhiloxNoise):
        @property
        def name(self) -> str:
            return "own"

    base, path = save_model(tmp_path / "base", small_config()), tmp_path / "journal.jsonl"
    with Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=0.1, zo_eps=0.1), noise=Own()), journal=path):
        pass
    with pytest.raises(OptionError, match=r"noise: found 'own'.*philox4x32-10-rademacher"):
        Engine(open_checkpoint(base), journal=path)
    with Engine(open_checkpoint(base), ZerothOrder(None, noise=Own()), journal=path) as engine:
        engine.flush()


def test_exact_mezo_is_its_noise_and_its_walk_whatever_else_is_said() -> None:
    exact = Optimization(exact_mezo=True, noise=Noise.GAUSSIAN)
    assert exact.generator() is None
    assert exact.estimator_of(1).perturb_in_place
    plain = Optimization()
    assert isinstance(plain.generator(), PhiloxNoise)
    assert not plain.estimator_of(1).perturb_in_place
    assert Optimization(noise=Noise.MEZO).generator() is None
    assert SequentialNoise([]).name == "torch-cpu-sequential"
