"""The run file: valid and invalid values, and what the errors say."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperpod_ft.config import cluster_config, run_file, yaml_text
from hyperpod_ft.errors import ConfigError, UserError
from tests.conftest import run_file_values


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load(tmp_path: Path, *overrides: str, **values: object) -> run_file.RunConfig:
    return run_file.load(write(tmp_path, yaml.safe_dump(run_file_values(tmp_path, **values))), overrides)


def refused(tmp_path: Path, *overrides: str, **values: object) -> str:
    with pytest.raises(UserError) as error:
        load(tmp_path, *overrides, **values)
    assert "\n" not in str(error.value), "one problem is one line"
    return str(error.value)


@pytest.mark.parametrize("name", run_file.recipes())
def test_recipes_are_valid(name: str) -> None:
    assert run_file.load(run_file.find(name)).name in name


def test_resolving_twice_changes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    once = load(tmp_path, dataset__source="./data.jsonl", dataset__revision=None)
    assert once.dataset.source == str(data)
    assert once.env.python == sys.executable
    assert run_file.resolve(once, Path("/elsewhere")) == once


def test_frozen_run_file_round_trips(tmp_path: Path) -> None:
    odd = [
        "1e5",
        "612e890",
        "010",
        "yes",
        "null",
        "~",
        "24:00:00",
        "",
        "=",
        "<<",
        "- x",
        "a: b",
        "#",
        "1_000",
        ".5",
        "0x1",
    ]
    values = run_file_values(
        tmp_path,
        name="1e5",
        model__revision="612e890",
        cluster__account="12e3",
        dataset__files=odd,
        cluster__environment={f"A{number}": value for number, value in enumerate(odd)},
        generate__prompts=[*odd, {"instruction": "1e5", "number": 1e5, "flag": True, "nothing": None}],
    )
    config = run_file.resolve(run_file.validate(values, "run.yaml"), tmp_path)
    assert run_file.load(write(tmp_path, yaml_text.dump(config))) == config


def test_local_data_is_pinned_by_content(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("1\n")
    first = load(tmp_path, dataset__source="./data.jsonl", dataset__revision=None).dataset.revision
    data.write_text("2\n")
    second = load(tmp_path, dataset__source="./data.jsonl", dataset__revision=None).dataset.revision
    data.write_text("1\n")
    third = load(tmp_path, dataset__source="./data.jsonl", dataset__revision=None).dataset.revision
    assert first == third != second
    assert "restore the files" in refused(tmp_path, dataset__source="./data.jsonl", dataset__revision=second)


def test_unknown_key_names_the_close_one(tmp_path: Path) -> None:
    assert "training.learning_rat: unknown key; did you mean learning_rate?" in refused(
        tmp_path, training__learning_rat=1
    )
    assert "clutser: unknown key; did you mean cluster?" in refused(tmp_path, clutser={})


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, training__epochs=-1, dataset__max_length=True, engine="jax")
    assert len(str(error.value).splitlines()) == 3


def test_missing_key_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "name: x\nengine: torch\nmodel: {source: a/b}\ndataset: {source: a/b}\n")
    with pytest.raises(ConfigError, match=r"dataset\.format: is missing"):
        run_file.load(path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [("training.learning_rate=1e-4", 1e-4), ("training.epochs=2", 2.0), ("training.learning_rate=3.0E-05", 3e-5)],
)
def test_overrides_are_yaml(tmp_path: Path, override: str, expected: float) -> None:
    config = load(tmp_path, override)
    assert getattr(config.training, override.split("=", maxsplit=1)[0].split(".")[1]) == expected


def test_override_of_a_list(tmp_path: Path) -> None:
    assert load(tmp_path, "lora.target_modules=[q_proj, v_proj]").lora.target_modules == ("q_proj", "v_proj")


@pytest.mark.parametrize("override", ["x", "=1", "training..epochs=1", "name.x=1"])
def test_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    assert "--set" in refused(tmp_path, override)


def test_time_limits_stay_text(tmp_path: Path) -> None:
    text = yaml.safe_dump(run_file_values(tmp_path)).replace("cluster:\n", "cluster:\n  time_limit: 24:00:00\n")
    assert run_file.load(write(tmp_path, text)).cluster.time_limit == "24:00:00"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2\n", "run.yaml:2: key 'a'"),
        ("a: [1\n", "run.yaml"),
        ("- 1\n", "no keys"),
        ("", "no keys"),
        ("1: 2\n", "run.yaml:1: key 1"),
        ("a: !!python/object/apply:os.system ['touch pwned']\n", "run.yaml"),
        ("a: !!bool maybe\n", "run.yaml"),
        ("a: !!timestamp foo\n", "run.yaml"),
        ("a: !!binary aGVsbG8=\n", "run.yaml"),
        ("a: !!set {x: null}\n", "run.yaml"),
        ("a: &a [*a]\n", "run.yaml"),
        ("a: " + "[" * 5000 + "]" * 5000 + "\n", "run.yaml"),
    ],
)
def test_bad_yaml_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        run_file.load(write(tmp_path, text))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{chr(ord(name) - 1)}'] * 9)}]\n" for name in "bcdefgh"
)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (BOMB, ("10,000", "aliases")),
        ("seed:\n" + BOMB.replace("\n", "\n  ").replace("a:", "  a:", 1), ("10,000", "aliases")),
        (f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 20)}]\n", ("1,000,000 characters", "aliases")),
        ("a: &a [*a]\n", ("alias",)),
        ("# " + "x" * 2_000_000, ("1,000,000 characters",)),
        ("a: " + "[" * 5000 + "]" * 5000 + "\n", ("20 levels",)),
        ("".join(f"a{n}: &a{n} [{f'*a{n - 1}' if n else ''}]\n" for n in range(30)), ("run.yaml:20: ", "20 levels")),
        ("a: [" + "1, " * 20_000 + "]\n", ("10,000",)),
        ("{" + ", ".join(f"k{n}: 1" for n in range(200)) + "}", ("unknown key", "more problems")),
        ('name: "\\uD83D"\n', ("run.yaml:1: ", "half of a surrogate pair")),
        ('{"\\uDE00": 1}\n', ("run.yaml:1: ", "half of a surrogate pair")),
        ("seed: " + "1" * 100 + "\n", ("seed", "2147483647")),
        ("seed: " + "1" * 100_000 + "\n", ("run.yaml:1: ", "100,000 digits")),
        ("seed: " + "x" * 100_000 + "\n", ("seed: must be a number (given: 'xxx", "...")),
        ("seed: [" + f"'{'x' * 100}', " * 2000 + "]\n", ("seed: must be a number (given: ['xxx", "...")),
        ("engine: " + "x" * 100_000 + "\n", ("engine", "'torch' or 'neuron'", "...")),
        ("? " + "k" * 100_000 + "\n: 1\n", ("kkk...: unknown key", "known: name, engine")),
        ("? [" + "k, " * 2000 + "]\n: 1\n", ("is not a string",)),
        ("a: !<" + "t" * 100_000 + "> 1\n", ("run.yaml:1: ttt",)),
        ("a: *" + "t" * 100_000 + "\n", ("run.yaml:1: ", "alias")),
        (f"cluster: {{environment: {{? {'9' * 100_000}- : a}}}}\n", ("cluster.environment: ", "999...")),
        (f"cluster: {{instance_type: {'9' * 100_000}a}}\n", ("cluster.instance_type: ", "999...", "trn1.32xlarge")),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
@pytest.mark.parametrize("load_file", [run_file.load, cluster_config.load], ids=["run", "cluster"])
def test_huge_input_gives_short_lines(
    tmp_path: Path, text: str, facts: tuple[str, ...], load_file: Callable[[Path], Any]
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        load_file(path)
    lines = str(error.value).splitlines()
    assert all(str(path) in line and len(line.replace(str(path), "").encode()) <= 300 for line in lines), lines
    assert len(lines) <= 21
    if load_file is run_file.load:
        assert all(fact in str(error.value) for fact in facts), lines


def test_huge_overrides_give_short_lines(tmp_path: Path) -> None:
    for override in (
        "x" * 100_000,
        "seed=" + "x" * 100_000,
        "seed.x" + "y" * 100_000 + "=1",
        "x" * 100_000 + "=1",
        "seed=[" + "[" * 5000,
        "seed=" + "1" * 2_000_000,
    ):
        assert len(refused(tmp_path, override).replace(str(tmp_path), "")) <= 300


def test_a_source_too_long_for_the_file_system_is_refused(tmp_path: Path) -> None:
    for source in ("./" + "x" * 5000, "x" * 5000 + "/y", "/" + "x/" * 5000, "example:" + "x" * 5000):
        message = refused(tmp_path, dataset__source=source, dataset__revision=None)
        assert "dataset.source" in message
        assert len(message) <= 300


def test_a_run_file_within_the_limits_can_be_opened_again(tmp_path: Path) -> None:
    """Resolving adds every default: what is then written has more values than the user's file had."""
    prompts = ["x"] * 9_900
    config = load(tmp_path, generate__prompts=prompts)
    path = tmp_path / "frozen.yaml"
    path.write_text(yaml_text.dump(config), encoding="utf-8")
    assert run_file.open_frozen(path) == config


def test_aliases_work(tmp_path: Path) -> None:
    text = yaml.safe_dump(run_file_values(tmp_path, generate__prompts=["x"]))
    path = write(tmp_path, text.replace("- x", "- &p question\n  - *p\n  - {instruction: *p}"))
    assert run_file.load(path).generate.prompts == ("question", "question", {"instruction": "question"})


def test_json_escapes_of_an_emoji_are_one_character(tmp_path: Path) -> None:
    config = run_file.load(write(tmp_path, json.dumps(run_file_values(tmp_path, generate__prompts=["\U0001f600"]))))
    assert config.generate.prompts == ("\U0001f600",)
    assert run_file.validate(yaml_text.read(yaml_text.dump(config), ""), "") == config


def test_yaml_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(UserError, match="run"):
        run_file.load(path)


@pytest.mark.parametrize(
    "root", ["/fsx/a$(touch pwned)", "/fsx/a\nb", "/fsx/'a", '/fsx/"a', "/fsx/a;b", "/fsx/`a`", "/fsx/%j", "/fsx/a\\b"]
)
def test_paths_that_a_shell_or_slurm_could_read_are_refused(tmp_path: Path, root: str) -> None:
    assert "cluster.root" in refused(tmp_path, cluster__root=root)


@pytest.mark.parametrize("root", ["/fsx/two words", "/fsx/größe/データ", "/fsx/a@b=c,d+e:f~g"])
def test_other_paths_work(tmp_path: Path, root: str) -> None:
    assert load(tmp_path, cluster__root=root).cluster.root == root


@pytest.mark.parametrize("value", ["dev\n#SBATCH --uid=0", "dev; id", "$(id)", "-dev", ""])
def test_slurm_words_are_strict(tmp_path: Path, value: str) -> None:
    assert "cluster.partition" in refused(tmp_path, cluster__partition=value)
    assert "cluster.account" in refused(tmp_path, cluster__account=value)


@pytest.mark.parametrize("name", ["a b", "../x", "$(id)", "", "ü", "-a", "a/b", "x" * 65, "a\n"])
def test_names_are_strict(tmp_path: Path, name: str) -> None:
    assert "name" in refused(tmp_path, name=name)


@pytest.mark.parametrize("source", ["a/b/c", "a b", "$(touch pwned)", "org/mod\nel", "a..b/c", "s3://", "s3://B/x"])
def test_sources_are_strict(tmp_path: Path, source: str) -> None:
    assert "model.source" in refused(tmp_path, model__source=source, model__revision=None)


def test_missing_local_source_is_named(tmp_path: Path) -> None:
    assert "no such file or directory" in refused(tmp_path, model__source="./nothing", model__revision=None)


def test_unknown_example_lists_the_known(tmp_path: Path) -> None:
    assert "known: preferences, qa, tiny-llama" in refused(
        tmp_path, model__source="example:llama", model__revision=None
    )


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"])
def test_secrets_are_refused(tmp_path: Path, name: str) -> None:
    message = refused(tmp_path, cluster__environment={name: "hunter2"})
    assert "looks like a secret" in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    "content",
    ["http://user:hunter2@proxy:3128", "hf_abcdefghijklmnop", "AKIAABCDEFGHIJKLMNOP", "--key sk-abcdefghijk"],
)
def test_secrets_under_other_names_are_refused(tmp_path: Path, content: str) -> None:
    message = refused(tmp_path, cluster__environment={"X": content})
    assert "looks like a secret" in message
    assert content not in message


@pytest.mark.parametrize("name", ["RUN_DIR", "PYTHONPATH", "python", "SLURM_JOB_ID", "MASTER_PORT", "BASH_ENV", "PATH"])
def test_names_that_the_scripts_set_are_refused(tmp_path: Path, name: str) -> None:
    assert "is set by the job scripts" in refused(tmp_path, cluster__environment={name: "x"})


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 2**63), ("training__epochs", 1e308), ("cluster__nodes", 10**23), ("dataset__max_length", 10**9)],
)
def test_numbers_that_would_overflow_later_are_refused(tmp_path: Path, key: str, value: float) -> None:
    assert key.replace("__", ".") in refused(tmp_path, **{key: value})


@pytest.mark.parametrize("values", [{"A B": "1"}, {"A": "x\ny"}, {"1A": "x"}, {"A\n": "x"}])
def test_environment_names_and_values_are_plain(tmp_path: Path, values: dict[str, str]) -> None:
    assert "cluster.environment" in refused(tmp_path, cluster__environment=values)


def test_templates_belong_to_their_format(tmp_path: Path) -> None:
    assert "completion_template" in refused(tmp_path, dataset__format="template")
    assert "format template, not dolly" in refused(tmp_path, dataset__prompt_template="x")


def test_engine_neuron_on_several_nodes_needs_a_volume(tmp_path: Path) -> None:
    section = {"region": "us-west-2", "role": "arn:aws:iam::111122223333:role/r", "store": "s3://bucket/ft"}
    neuron = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge", "sagemaker": section}
    assert "set sagemaker.file_system instead" in refused(tmp_path, cluster__nodes=2, **neuron)
    assert load(tmp_path, **neuron).sagemaker


def test_engines_and_instances_fit(tmp_path: Path) -> None:
    assert "engine neuron needs a trn instance" in refused(tmp_path, engine="neuron")
    assert "unknown instance type" in refused(tmp_path, cluster__instance_type="trn9")
    assert "does not run on trn1" in refused(tmp_path, cluster__instance_type="trn1.32xlarge")
    assert load(tmp_path, cluster__instance_type="ml.p5.48xlarge").cluster.instance_type == "p5.48xlarge"
    assert "merge.dtype" in refused(tmp_path, training__method="full", merge__dtype="float32")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallelism__offload", "optimizer"),
        ("parallelism__offload", "parameters"),
        ("training__activation_offload", True),
        ("training__optimizer_state", "int8"),
        ("lora__quantization", "nf4"),
        ("cluster__environment", {"TORCH_NEURONX_NEFF_CACHE_DIR": "/tmp/cache"}),
        ("cluster__environment", {"TORCH_NEURONX_NEFF_DISABLE_CACHE": "1"}),
        ("cluster__environment", {"NEURON_LOGICAL_NC_CONFIG": "1"}),
    ],
)
def test_what_engine_torch_has_not_on_trainium(tmp_path: Path, key: str, value: object) -> None:
    trainium = {"cluster__instance_type": "trn2.48xlarge", "env": {}, "parallelism__tensor_parallel": 1}
    assert load(tmp_path, **trainium).env.python is None, "stage env installs TorchNeuron"
    said = refused(tmp_path, **trainium, **{key: value})
    assert key.replace("__", ".") in said and len(said.splitlines()) == 1
    if key != "cluster__environment":
        assert load(tmp_path, cluster__instance_type="p5.48xlarge", parallelism__tensor_parallel=1, **{key: value})


@pytest.mark.parametrize(("key", "value"), [("dora", True), ("plus_ratio", 16), ("quantization", "nf4")])
def test_variants_of_lora_are_for_engine_torch(tmp_path: Path, key: str, value: object) -> None:
    lora = {f"lora__{key}": value, "parallelism": {"tensor_parallel": 1}}
    assert getattr(load(tmp_path, **lora).lora, key) == value
    said = refused(tmp_path, engine="neuron", cluster__instance_type="trn1.32xlarge", **lora)
    assert f"lora.{key}: engine neuron does not support it" in said and len(said.splitlines()) == 1


def test_weights_in_4_bits_are_not_divided(tmp_path: Path) -> None:
    four = {"lora__quantization": "nf4"}
    assert "lora.quantization" in refused(tmp_path, **four, training__method="full")
    assert "set parallelism.tensor_parallel to 1" in refused(tmp_path, **four, parallelism={"tensor_parallel": 2})


PREFERENCE = {"training__objective": "dpo", "dataset__format": "preference"}


def test_objective_and_format_go_together(tmp_path: Path) -> None:
    config = load(tmp_path, **PREFERENCE, dpo={"beta": 0.3})
    assert (config.dpo.beta, config.dpo.label_smoothing, config.dataset.documents_per_example) == (0.3, 0.0, 2)
    for key, value in PREFERENCE.items():
        assert "objective dpo and format preference go together" in refused(tmp_path, **{key: value})
    assert "dpo.label_smoothing" in refused(tmp_path, **PREFERENCE, dpo={"label_smoothing": 0.5})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset__packing": "wrapped"}, "dataset.packing: wrapped would cut pairs"),
        ({"dataset__loss_on": "all"}, "dataset.loss_on: "),
        (
            {"parallelism": {"pipeline_parallel": 2}},
            "parallelism.pipeline_parallel: objective dpo does not support pipelines; set it to 1",
        ),
        (
            {"parallelism": {"context_parallel": 2}},
            "parallelism.context_parallel: objective dpo needs all tokens of a pair on one rank",
        ),
        ({"cluster__instance_type": "trn2.48xlarge", "env__python": "/opt/python"}, "use a GPU instance type"),
        ({"engine": "neuron", "cluster__instance_type": "trn1.32xlarge"}, "only engine torch supports dpo"),
    ],
)
def test_what_preferences_do_not_go_with_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refused(tmp_path, **PREFERENCE, **changes)


def test_find_suggests_a_recipe() -> None:
    with pytest.raises(UserError, match="no such run file"):
        run_file.find("x" * 5000)
    with pytest.raises(UserError, match="did you mean quickstart"):
        run_file.find("quickstrat")


@pytest.mark.parametrize("given", ["https://user:s3cretpw@host/simple", ["https://user:s3cretpw@host/simple"]])
def test_no_refusal_shows_a_password(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        run_file.validate(run_file_values(tmp_path, env__package_repositories=given), "run.yaml")
    assert "s3cretpw" not in str(refused.value)
    assert "package_repositories" in str(refused.value)


def test_a_schedule_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    for schedule in ("interleaved", "gpipe"):
        given = {"parallelism": {"pipeline_schedule": schedule}}
        assert "parallelism.pipeline_schedule: has no effect without a pipeline" in refused(tmp_path, **given)
    given = {"parallelism": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 4}}
    assert "has no effect without pipeline_schedule interleaved" in refused(tmp_path, **given)


def test_activations_that_the_engine_does_not_recompute_are_refused(tmp_path: Path) -> None:
    every = {"training__activation_checkpointing_every": 2}
    assert "activation_checkpointing_every: has no effect" in refused(tmp_path, **every)
    neuron = {"engine": "neuron", "cluster__instance_type": "trn1.32xlarge"}
    for settings, key in (
        ({"training__activation_checkpointing": "selective"}, "activation_checkpointing"),
        ({"training__activation_checkpointing": "full"} | every, "activation_checkpointing"),
        ({"training__activation_offload": True}, "activation_offload"),
        ({"training__compile": True}, "compile"),
    ):
        assert f"training.{key}: " in refused(tmp_path, **neuron, **settings)
