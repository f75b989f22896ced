"""Models that do not fit into accelerator memory are refused, with what would make them fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch.preflight import check_run
from hyperpod_ft.planning.certificate import Certificate
from hyperpod_ft.planning.memory import GIB, Memory, available
from hyperpod_ft.planning.model_fit import check_memory, check_model_directory
from hyperpod_ft.planning.parallelism import degrees_of
from hyperpod_ft.runs.run import Run
from hyperpod_ft.stages import certify, download, train
from hyperpod_ft.stages.stage import perform
from scripts.memory_table import LLAMA_3_8B, LLAMA_3_70B
from tests.unit.planning.memory_estimates import MakeRun, estimated, shape_of, trn1
from tests.unit.stage_runs import finish, weights


@pytest.mark.parametrize(
    ("overrides", "model_config", "remedy"),
    [
        (
            {"training__activation_checkpointing": "none", "training__method": "full", "training__micro_batch_size": 8},
            LLAMA_3_8B,
            "training.activation_checkpointing: full",
        ),
        (
            {"training__micro_batch_size": 64},
            LLAMA_3_8B,
            "training.micro_batch_size: 32, training.gradient_accumulation_steps: 2",
        ),
        ({}, LLAMA_3_70B, "parallelism.tensor_parallel: 16"),
        (
            {
                "training__method": "full",
                "neuron": {"zero_1": False, "master_weights": False},
                "parallelism": {"tensor_parallel": 4},
            },
            LLAMA_3_8B,
            "GiB: neuron.zero_1: true",
        ),
        ({"training__method": "full"}, LLAMA_3_70B, "training.method: lora"),
        ({}, LLAMA_3_70B | {"num_attention_heads": 8, "head_dim": 1024}, "parallelism.pipeline_parallel: 2"),
        (
            {"parallelism": {"tensor_parallel": 32}},
            LLAMA_3_70B | {"num_hidden_layers": 280},
            "parallelism.pipeline_parallel: 2, cluster.nodes: 2",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_what_would(
    make_run: MakeRun, overrides: dict[str, Any], model_config: dict[str, Any], remedy: str
) -> None:
    config = trn1(make_run, **overrides)
    with pytest.raises(UserError) as error:
        check_memory(config, degrees_of(config), shape_of(model_config))
    assert "14.4 of its 16 GiB" in str(error.value)
    assert "GiB per rank (weights " in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.parametrize(
    ("length", "changes"),
    [
        (16384, "training.activation_checkpointing: selective"),
        (32768, "training.activation_checkpointing: full"),
    ],
)
def test_activations_are_the_first_to_go_on_engine_torch(make_run: MakeRun, length: int, changes: str) -> None:
    config = make_run(cluster__instance_type="p5.48xlarge", parallelism={}, dataset__max_length=length).config
    with pytest.raises(UserError, match=f"GiB: {changes}"):
        check_memory(config, degrees_of(config), shape_of(LLAMA_3_8B))


def test_offload_leaves_two_layers_on_the_device(make_run: MakeRun) -> None:
    def kept(**training: Any) -> float:
        settings = {f"training__{key}": value for key, value in training.items()}
        return estimated(
            make_run(cluster__instance_type="p5.48xlarge", parallelism={}, **settings).config, LLAMA_3_8B
        ).activations

    assert kept(activation_offload=True) == pytest.approx(kept() / 16)
    full, second = (
        kept(activation_checkpointing="full"),
        kept(activation_checkpointing="full", activation_checkpointing_every=2),
    )
    inputs = 2048 * 4096 * 2
    assert full - kept(activation_checkpointing="full", activation_offload=True) == 30 * inputs
    assert second - full == pytest.approx(16 * (kept() / 32 - inputs))


def test_a_model_that_fits_nowhere(make_run: MakeRun) -> None:
    config = trn1(make_run)
    shape = shape_of(LLAMA_3_70B | {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "head_dim": 1024})
    with pytest.raises(UserError, match="choose a smaller model"):
        check_memory(config, degrees_of(config), shape)


def test_cpus_have_no_such_limit(make_run: MakeRun) -> None:
    config = make_run().config
    assert available(config) == 0
    assert check_memory(config, degrees_of(config), shape_of(LLAMA_3_70B)) is None


ROTARY_OF_5 = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}


def test_a_model_on_disk_is_checked(make_run: MakeRun, tmp_path: Path) -> None:
    file = tmp_path / "config.json"

    def check(config: RunConfig, values: Any) -> Memory | None:
        file.write_text(json.dumps(values))
        return check_model_directory(config, degrees_of(config), tmp_path).memory

    config = trn1(make_run)
    assert check(config, LLAMA_3_8B) == estimated(config, LLAMA_3_8B)
    for values, words in (
        (LLAMA_3_70B, "this would fit"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({}, "models of type ''"),
        ([], "config.json: is not a JSON object"),
        (LLAMA_3_8B | {"num_attention_heads": 36}, "36 attention heads"),
        (LLAMA_3_8B | ROTARY_OF_5, "rope_parameters .* repeat them there as rope_theta"),
    ):
        with pytest.raises(UserError, match=words):
            check(config, values)
    assert check(config, LLAMA_3_8B | ROTARY_OF_5 | {"rope_theta": 5e5})
    assert check(make_run().config, LLAMA_3_8B | ROTARY_OF_5) is None
    assert check(make_run().config, {"model_type": "gpt_neox"}) is None, "left to engine torch"


def test_an_evaluation_that_could_not_load_the_model_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    """Before its training: by `submit` where the model is here, else by stage download."""
    (tmp_path / "model").mkdir()
    settings = {"parallelism": {"ranks_per_node": 1}, "model": {"source": str(tmp_path / "model")}}
    plain, evaluated = make_run(**settings), make_run(**settings, eval={"tasks": ["arc_easy"]})

    def describe(model_type: str, **values: Any) -> None:
        (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": model_type} | values))

    nested = {"text_config": {"model_type": "llama"}}
    describe("llava", **nested)
    check_model_directory(plain.config, plain.plan.degrees, tmp_path / "model")
    with pytest.raises(UserError, match=r"^eval: [^\n]* of type 'llava'; remove the section[^\n]*$"):
        check_run(evaluated)
    for others in ({}, nested):
        describe("gemma3" if others else "llama", **others)
        check_model_directory(evaluated.config, evaluated.plan.degrees, tmp_path / "model")


def of_70b(make_run: MakeRun, tmp_path: Path, **settings: Any) -> Run:
    """A run whose model has only a real configuration."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(LLAMA_3_70B))
    (model / "model.safetensors").write_bytes(weights(norm=b"1234"))
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "context": "", "response": "b"}\n')
    dataset = {"source": str(tmp_path / "rows.jsonl"), "format": "dolly"}
    run = make_run(model={"source": str(model)}, dataset=dataset, **settings)
    run.freeze()
    finish(run, "env")
    return run


@pytest.fixture
def too_large(make_run: MakeRun, tmp_path: Path) -> Run:
    """A run whose model takes more than a core has."""
    core = {"cluster__instance_type": "trn1.32xlarge", "parallelism": {"tensor_parallel": 8}}
    return of_70b(make_run, tmp_path, engine="neuron", **core)


def test_download_refuses_what_cannot_fit(too_large: Run) -> None:
    with pytest.raises(UserError, match="this would fit"):
        perform(too_large, "download", download.work)
    assert not too_large.journal.is_done("download")


def test_every_check_asks_for_the_fewest_nodes(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model on the Hub, stages download and certify are the first that can."""
    nodes: dict[str, Any] = {"cluster__instance_type": "p5.48xlarge", "cluster__nodes": 4, "training__method": "full"}
    nodes |= {"parallelism": {"tensor_parallel": 8}, "training__gradient_accumulation_steps": 3}
    run = of_70b(make_run, tmp_path, **nodes)
    perform(run, "download", download.work)
    monkeypatch.setattr("hyperpod_ft.engines.torch.certificate.certify.certify", lambda *_: Certificate())
    assert certify._torch(run, tmp_path / "scratch")
    fewer = of_70b(make_run, tmp_path, **nodes, cluster__min_nodes=1)
    for check in (check_run, download.work, lambda run: certify._torch(run, tmp_path / "scratch")):
        with pytest.raises(UserError, match="this would fit"):
            check(fewer)


def test_training_refuses_what_cannot_fit_before_it_begins(too_large: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is already there, as if another run had fetched it. One process stands in for all ranks."""
    too_large.paths.base_model.mkdir(parents=True)
    (too_large.paths.base_model / "config.json").write_text(json.dumps(LLAMA_3_70B))
    monkeypatch.setattr(train, "engine", lambda _: None)
    monkeypatch.setattr(train.stage, "main", lambda _, work: work(too_large))
    store = HashStore()
    with pytest.raises(UserError, match="this would fit"):
        train._run_rank_0(Ranks(0, 32, 0, store))
    assert store.get("hyperpod_ft/train/layout") == b"", "the other ranks leave too"


def test_a_trial_that_rank_0_refuses_ends_on_every_rank(
    too_large: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    too_large.paths.base_model.mkdir(parents=True)
    (too_large.paths.base_model / "config.json").write_text(json.dumps(LLAMA_3_70B))
    monkeypatch.setattr(train, "engine", lambda _: None)
    store = HashStore()
    for rank in (0, 1):
        with pytest.raises(SystemExit) as ended:
            train._trial(too_large, Ranks(rank, 32, 0, store))
        assert ended.value.code == 2
    assert capsys.readouterr().err.count("error: train: ") == 1, "rank 0 says why"


def test_mistral_7b_fits_on_texts_of_512_tokens_as_in_awss_notebook(make_run: MakeRun, tmp_path: Path) -> None:
    """All parameters on one p4d, each text in a row of its own, which is padded."""
    mistral = LLAMA_3_8B | {"model_type": "mistral", "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(mistral))
    text = {"dataset__format": "text", "dataset__max_length": 512, "dataset__packing": "none"}
    full = {"training__method": "full", "training__epochs": 10, "parallelism": {"sharding": "zero3"}}
    run = make_run(**text, **full, cluster__instance_type="p4d.24xlarge")
    fit = check_model_directory(run.config, run.plan.degrees, tmp_path)
    assert fit.sharding == "zero3 over 8 ranks" and run.config.rows_per_step(run.plan.degrees.data_parallel) == 8
    assert fit.memory is not None and fit.memory.total / GIB == pytest.approx(19.5, abs=0.05)
