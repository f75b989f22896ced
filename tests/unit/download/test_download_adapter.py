"""The adapter that training continues: fetched beside the model, whole or not at all, and refused early."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from hyperpod_ft.checkpoint.formats.model_directory import read_config
from hyperpod_ft.clean.needs import needs
from hyperpod_ft.config.sources import EXAMPLES
from hyperpod_ft.download.fetch import MANIFEST
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.run import Run
from hyperpod_ft.shipped import shipped
from hyperpod_ft.stages import download as stage
from hyperpod_ft.stages.stage import perform
from tests.unit.download.test_download_hub import environment
from tests.unit.hub_server import GOOD_TOKEN, Hub, Repository, serve
from tests.unit.stage_runs import finished, make_run, tree

LAYERS = read_config(shipped("examples") / EXAMPLES["tiny-llama"])["num_hidden_layers"]
WIDTH = read_config(shipped("examples") / EXAMPLES["tiny-llama"])["hidden_size"]
SAVED = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"], "peft_version": "0.21.2"}


def factors(width: int = WIDTH, layers: int = LAYERS, value: float = 0.1) -> bytes:
    tensors = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = np.full((2, width), value, np.float32)
        tensors[f"{name}.lora_B.weight"] = np.full((width, 2), value, np.float32)
    return bytes(save(tensors))


def files(weights: bytes = b"", **config: Any) -> dict[str, bytes]:
    return {
        "adapter_config.json": json.dumps(SAVED | config).encode(),
        "adapter_model.safetensors": weights or factors(),
        "README.md": b"card",
    }


def run_of(tmp_path: Path, adapter: dict[str, Any], lora: dict[str, Any] | None = None) -> Run:
    dataset = {"source": "example:qa", "format": "prompt-completion"}
    more = {"model": {"source": "example:tiny-llama", "adapter": adapter}, "lora": lora or {}}
    return make_run(tmp_path, "", dataset, more=more)


def local_run(tmp_path: Path, saved: dict[str, bytes], lora: dict[str, Any] | None = None) -> Run:
    directory = tmp_path / "saved"
    directory.mkdir(exist_ok=True)
    for name, content in saved.items():
        (directory / name).write_bytes(content)
    return run_of(tmp_path, {"source": str(directory)}, lora)


def test_a_local_one_is_copied_without_what_training_does_not_read(tmp_path: Path) -> None:
    others = {"optimizer.pt": b"pickle", "training_args.bin": b"pickle", "adapter_model.bin": b"pickle"}
    run = local_run(tmp_path, files() | others)
    assert run.config.lora.r == 2, "known when it is planned"
    perform(run, "download", stage.work)
    assert run.paths.starting_adapter is not None
    assert tree(run.paths.starting_adapter).keys() == {*files(), MANIFEST}
    record = run.journal.record("download")
    assert record is not None and record.facts["model.adapter"]["files"] == 3
    assert run.journal.is_done("download")
    assert {run.paths.relative(path) for path in run.paths.fetched} <= needs(run), "clean keeps it"
    (run.paths.starting_adapter / "adapter_model.safetensors").unlink()
    assert not run.journal.is_done("download"), "its record has the adapter's files"


def test_a_contradiction_is_refused_when_it_is_planned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^lora\.r: is 4, and 2 in the adapter_config\.json"):
        local_run(tmp_path, files(), {"r": 4})
    (tmp_path / "saved" / "adapter_config.json").unlink()
    with pytest.raises(UserError, match=r"^model\.adapter\.source: .*adapter_config\.json: is missing"):
        run_of(tmp_path, {"source": str(tmp_path / "saved")})


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"adapter_config.json": files()["adapter_config.json"], "adapter_model.bin": b"pickle"}, "never loaded"),
        (files(b"damaged!"), "adapter_model.safetensors"),
        (files(factors(value=float("nan"))), "holds NaN"),
        (files(factors(width=WIDTH * 2)), "does not fit the base model"),
        (files(factors(layers=LAYERS - 1)), "has no factors for"),
        (files(target_modules=["o_proj", "no_such"]), "no_such"),
        (files(bytes(save({"base_model.model.lm_head.weight": np.ones((2, 2), np.float32)}))), "does not continue"),
    ],
    ids=["pickle", "damaged", "nan", "another size", "incomplete", "unknown module", "a whole module"],
)
def test_what_cannot_be_continued_leaves_no_record(tmp_path: Path, saved: dict[str, bytes], said: str) -> None:
    run = local_run(tmp_path, saved)
    with pytest.raises(UserError) as caught:
        perform(run, "download", stage.work)
    message = str(caught.value)
    assert message.startswith("model.adapter.source: ") and said in message and "\n" not in message
    assert run.journal.record("download") is None


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve({"org/adapter": Repository(files())}) as started:
        yield started


def test_one_of_the_hub_is_known_once_it_is_here(tmp_path: Path, hub: Hub) -> None:
    commit = hub.repositories["org/adapter"].commit
    run = run_of(tmp_path, {"source": "org/adapter", "revision": commit})
    wrong = make_run(
        tmp_path,
        "",
        {"source": "example:qa", "format": "prompt-completion"},
        more={"model": run.config.model.model_dump(), "lora": {"alpha": 5}},
    )
    assert run.config.lora.r == 16 and run.plan == wrong.plan, "what the adapter says is not known yet"
    status, output = finished("download", wrong, **environment(hub, tmp_path, GOOD_TOKEN))
    assert status == 2 and "error: download: lora.alpha: is 5" in output
    run.freeze()
    status, output = finished("download", run, **environment(hub, tmp_path, GOOD_TOKEN))
    assert status == 0, output
    assert run.paths.starting_adapter == run.paths.root / "adapters" / f"org--adapter@{commit}"
    again = Run.open(run.paths.directory)
    assert (again.config.lora.r, again.config.lora.alpha) == (2, 4)
    assert Run.of(run.config).config == again.config and Run.of(run.config).plan == run.plan
