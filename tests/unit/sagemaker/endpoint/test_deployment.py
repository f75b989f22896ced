"""What is refused before anything costs, and what is uploaded. The run is made by hand: no model is computed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyperpod_ft.config import run_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.records import Record, outputs_of, utc_now
from hyperpod_ft.runs.results.samples import RecordedAnswers, Samples
from hyperpod_ft.runs.run import Run
from hyperpod_ft.sagemaker.endpoint.bundle import small_files_in_store
from hyperpod_ft.sagemaker.endpoint.deployment import deployment, endpoint_name, is_endpoint_name, with_settings

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
DEPLOY = {"instance_type": "g6.12xlarge", "store": "s3://models/kit/", "role": "arn:aws:iam::123456789012:role/r"}


def make_run(base: Path, config: dict[str, Any] | None = None, **sections: Any) -> Run:
    values: dict[str, Any] = {
        "name": "my_run.1",
        "engine": "torch",
        "cluster": {"root": str(base / "root")},
        "parallelism": {"ranks_per_node": 1},
        "env": {"python": "current"},
        "model": {"source": "example:tiny-llama"},
        "dataset": {"source": "example:qa", "format": "dolly", "max_length": 128},
        "deploy": DEPLOY,
        **sections,
    }
    run = Run.of(run_file.resolve(run_file.validate(values, "test"), base))
    for directory in (run.paths.tuned_model, run.paths.base_model, run.paths.adapter):
        directory.mkdir(parents=True)
    for directory in (run.paths.tuned_model, run.paths.base_model):
        (directory / "config.json").write_text(json.dumps(config or CONFIG))
        (directory / "model.safetensors").write_bytes(bytes(4096))
        (directory / "tokenizer.json").write_text("{}")
        (directory / "requirements.txt").write_text("evil\n")
    (run.paths.tuned_model / "chat_template.jinja").write_text("{{ messages }}")
    adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 32}
    (run.paths.adapter / "adapter_config.json").write_text(json.dumps(adapter))
    (run.paths.adapter / "adapter_model.safetensors").write_bytes(bytes(64))
    outputs = outputs_of(run.paths.root, [run.paths.tuned_model])
    record = Record("merge", run.plan["merge"].fingerprint, {}, outputs, {}, utc_now(), 0.0, "test", "")
    record.write(run.paths.record_path("merge"))
    given = [RecordedAnswers(prompt, False, "a", "b") for prompt in ("q", "")]
    Samples.of(given, [], 2, None).write(run.paths.samples_path)
    return run


def keys(run: Run) -> list[str]:
    parts = deployment(run, "us-west-2").target.bundle.parts
    return sorted("/".join(filter(None, (part.prefix, file.name))) for part in parts for file in part.files)


def test_the_bundle_is_the_model_and_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    found = deployment(run, "us-west-2")
    assert keys(run) == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert found.target.bundle.chat
    assert found.target.url.startswith(f"s3://models/kit/endpoints/{endpoint_name(run)}/")
    assert found.target.bundle.dtype == "bfloat16"  # fp32 weights are served in bf16
    assert found.target.bundle.served.weight_bytes == 2048


def test_the_kits_own_server_keeps_the_dtype_and_has_the_whole_model_on_each_gpu(tmp_path: Path) -> None:
    t5 = {"model_type": "t5", "num_heads": 4, "n_positions": 128, "dtype": "float32"}
    pairs = {"source": "example:qa", "format": "dolly", "max_length": 512, "max_target_length": 64}
    with pytest.raises(UserError, match=r"deploy\.container: vLLM does not serve encoder-decoders; set it to kit"):
        make_run(tmp_path / "vllm", t5, dataset=pairs)
    run = make_run(tmp_path, t5, dataset=pairs, deploy={**DEPLOY, "container": "kit"})
    found = deployment(run, "us-west-2")
    assert found.target.bundle.served.weight_bytes == 4096
    assert (found.target.fit.tensor_parallel, found.target.fit.instance.devices) == (1, 4)
    assert found.target.fit.max_length > 512, "n_positions limits nothing"
    with pytest.raises(UserError, match="model: container kit does not serve adapters"):
        with_settings(run, ["deploy.model=adapter"])


def test_an_adapter_of_experts_is_refused(tmp_path: Path) -> None:
    run = with_settings(make_run(tmp_path), ["deploy.model=adapter"])
    file = run.paths.adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_parameters": ["experts.down_proj"]}))
    with pytest.raises(UserError, match=r"target_parameters; set deploy\.model to merged"):
        keys(run)


def test_an_adapter_comes_with_the_base_models_weights_and_the_tuned_models_tokenizer(tmp_path: Path) -> None:
    run = with_settings(make_run(tmp_path), ["deploy.model=adapter"])
    assert keys(run) == [
        "adapters/tuned/adapter_config.json",
        "adapters/tuned/adapter_model.safetensors",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    roots = {file.name: part.root for part in deployment(run, "us-west-2").target.bundle.parts for file in part.files}
    assert roots["model.safetensors"] == run.paths.base_model
    assert roots["chat_template.jinja"] == run.paths.tuned_model


def test_the_longest_request_is_that_of_training_and_an_answer(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert deployment(run, "us-west-2").target.fit.max_length == 128 + 64
    long = with_settings(run, ["deploy.max_length=512"])
    assert deployment(long, "us-west-2").target.fit.max_length == 512


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"deploy": None}, "no section deploy"),
        ({"deploy": DEPLOY | {"store": None}}, r"deploy\.store: is not set"),
        ({"deploy": DEPLOY | {"role": None}}, r"deploy\.role: is not set"),
        ({"deploy": DEPLOY | {"max_length": 513}}, "512 positions"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, sections: dict[str, Any], problem: str) -> None:
    run = make_run(tmp_path, **sections)
    with pytest.raises(UserError, match=problem):
        deployment(run, "us-west-2")


def test_an_endpoint_that_could_not_be_proved_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert [one.prompt for one in deployment(run, "us-west-2").recorded] == ["q"], "an empty prompt is not sent"
    blank = RecordedAnswers(" ", False, "a", "b")
    Samples.of([blank], [], 1, None).write(run.paths.samples_path)
    with pytest.raises(UserError, match=r"samples\.json: has no prompt.*generate\.prompts"):
        deployment(run, "us-west-2")
    run.paths.samples_path.unlink()
    with pytest.raises(UserError, match=r"samples\.json: is missing.*resume"):
        deployment(run, "us-west-2")


def test_a_run_without_a_tuned_model_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.paths.record_path("merge").unlink()
    with pytest.raises(UserError, match=r"no tuned model yet.*resume"):
        deployment(run, "us-west-2")


def test_other_settings_leave_the_run_what_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    other = with_settings(run, ["deploy.instance_type=g6e.xlarge", "deploy.instances=2"])
    assert other.paths.directory == run.paths.directory
    assert other.plan == Run.of(other.config).plan
    assert other.config.deploy is not None
    assert other.config.deploy.instances == 2
    with pytest.raises(UserError, match="only keys of section deploy"):
        with_settings(run, ["training.epochs=1"])


def test_names_are_sagemakers_and_recognized(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    name = endpoint_name(run)
    assert name == f"my-run-1-{run.plan.run_id}"
    assert is_endpoint_name(name)
    assert not is_endpoint_name("someone-elses")
    long = make_run(tmp_path / "long", name="a" * 64)
    assert len(endpoint_name(long)) == 54
    assert is_endpoint_name(endpoint_name(long))


def test_a_model_that_only_the_store_has_is_served_from_there(tmp_path: Path) -> None:
    """As after training jobs: records and small files are here, weights are not."""
    role = "arn:aws:iam::123456789012:role/jobs"
    store = {"region": "us-west-2", "role": role, "store": "s3://kit/runs-of-us"}
    run = make_run(tmp_path, deploy={"instance_type": "g6.12xlarge"}, sagemaker=store)
    weights = run.paths.tuned_model / "model.safetensors"
    run.paths.store_listing.write_text(json.dumps({weights.relative_to(run.paths.root).as_posix(): 4096}))
    weights.unlink()
    (run.paths.tuned_model / "tokenizer.json").unlink()
    samples = run.paths.samples_path.rename(tmp_path / "samples.json")
    assert small_files_in_store(run) == [
        (run.paths.tuned_model / "tokenizer.json").relative_to(run.paths.root).as_posix(),
        run.paths.samples_path.relative_to(run.paths.root).as_posix(),
    ]
    samples.rename(run.paths.samples_path)
    (run.paths.tuned_model / "tokenizer.json").write_text("{}")
    found = deployment(run, "us-west-2")
    assert found.target.url == f"s3://kit/runs-of-us/runs/my_run.1/{run.plan.run_id}/merged"
    assert found.target.bundle.parts == ()
    assert found.target.bundle.served.weight_bytes == 2048
    assert found.target.role == role
    with pytest.raises(UserError, match=r"deploy\.model.*store only"):
        deployment(with_settings(run, ["deploy.model=adapter"]), "us-west-2")


def test_a_model_that_was_made_again_is_another_one(tmp_path: Path) -> None:
    """`submit --force`: with the same fingerprint, and files of the same sizes."""
    run = make_run(tmp_path)
    first, same = deployment(run, "us-west-2").target, deployment(run, "us-west-2").target
    record = run.journal.record("merge")
    assert record is not None
    replace(record, started="2026-01-01T00:00:00Z").write(run.paths.record_path("merge"))
    again = deployment(run, "us-west-2").target
    assert first == same
    assert len({first.url, again.url}) == len({first.bundle.version, again.bundle.version}) == 2
