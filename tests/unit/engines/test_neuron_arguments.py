"""Engine neuron's arguments for optimum-neuron's trainer, checked against the trainer's source."""

import ast
import sys
from pathlib import Path

import pytest

from hyperpod_ft.engines.neuron.arguments import arguments
from tests.conftest import MakeRun
from tests.tasks import task_without_model

SOURCES = Path(sys.prefix) / "neuron-sources"  # scripts/setup.sh puts them there
NEURON = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "parallelism": {"ranks_per_node": 8}}


def fields(file: str, name: str) -> set[str]:
    """The annotated fields of a dataclass, by its source."""
    tree = ast.parse((SOURCES / file).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


@pytest.mark.skipif(not SOURCES.is_dir(), reason=f"{SOURCES} is not there: scripts/test.sh makes it")
def test_every_argument_is_a_field_of_the_trainers_settings(make_run: MakeRun) -> None:
    known = fields("optimum/neuron/trainers/training_args.py", "NeuronTrainingArguments")
    known |= fields("trl/trainer/sft_config.py", "SFTConfig")
    given = arguments(task_without_model(make_run(**NEURON)), 100)
    assert not given.keys() - known
    assert "zero_1" in known and "dataset_kwargs" in known


def test_the_run_file_reaches_the_trainer(make_run: MakeRun) -> None:
    run = make_run(
        **NEURON,
        training__micro_batch_size=2,
        training__gradient_accumulation_steps=3,
        training__max_grad_norm=0,
        neuron={"zero_1": False, "sequence_parallel": False},
        training__precision="fp32",
        training__async_save=True,
    )
    given = arguments(task_without_model(run), 77)
    assert (given["max_steps"], given["per_device_train_batch_size"], given["gradient_accumulation_steps"]) == (
        77,
        2,
        3,
    )
    assert (given["tensor_parallel_size"], given["zero_1"], given["disable_sequence_parallel"]) == (8, False, True)
    assert (given["bf16"], given["async_save"], given["dataset_kwargs"]) == (
        False,
        True,
        {"skip_prepare_dataset": True},
    )
    assert given["max_grad_norm"] > 1e9
    # nothing goes to a hub or a tracker
    assert given["skip_cache_push"] and given["report_to"] == "none"
