"""Models of the fixtures, loaded once through the weight loader they also test."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from qwen_cases import CASES, GOLDEN, seed_weights, write_folder

from models.qwen import LoadedModel, QwenConfig, load


@pytest.fixture(scope="session")
def case_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    """Returns name -> the loaded model of a case."""

    @functools.cache
    def get(name: str) -> LoadedModel:
        hf = CASES[name]
        folder = tmp_path_factory.mktemp(name)
        return load(write_folder(folder, hf, seed_weights(QwenConfig.from_hf(hf))))

    return get


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    """Returns name -> the arrays of a fixture, after checking that its weights are still the same."""

    @functools.cache
    def get(name: str) -> dict[str, np.ndarray]:
        with np.load(GOLDEN / f"{name}.npz") as file:
            arrays = dict(file)
        tensors = seed_weights(QwenConfig.from_hf(CASES[name])).values()
        checksum = sum(float(np.abs(tensor).sum(dtype=np.float64)) for tensor in tensors)
        assert checksum == pytest.approx(float(arrays["checksum"]), rel=1e-6), "weights drifted"
        return arrays

    return get
