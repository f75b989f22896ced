"""Estimates of memory for the models and runs of tests."""

from typing import Any

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.planning.memory import Memory
from hyperpod_ft.planning.model_fit import check_trainable, estimate
from hyperpod_ft.planning.model_shape import ModelShape, model_shape
from hyperpod_ft.planning.parallelism import degrees_of
from tests.conftest import MakeRun


def shape_of(model_config: dict[str, Any]) -> ModelShape:
    shape = model_shape(model_config)
    assert shape is not None
    return shape


def trn1(make_run: MakeRun, **overrides: Any) -> RunConfig:
    values = {
        "engine": "neuron",
        "cluster__instance_type": "trn1.32xlarge",
        "parallelism": {"tensor_parallel": 8},
        "dataset__max_length": 2048,
        "training__activation_checkpointing": "full",
    }
    return make_run(**values | overrides).config


def estimated(config: RunConfig, model_config: dict[str, Any]) -> Memory:
    shape = check_trainable(config, degrees_of(config), model_config)
    assert shape is not None
    return estimate(config, degrees_of(config), shape)
