"""`parallelism.degrees: auto` and `engine: auto` as a user meets them."""

import json
from pathlib import Path

from scripts.memory_table import LLAMA_3_8B
from tests.programs import call
from tests.unit.cli.test_cli import refused
from tests.unit.hub_server import Repository, serve

RUN_FILE = """
name: auto
engine: auto
cluster: {root: root, instance_type: p4d.24xlarge}
model: {source: SOURCE}
dataset: {source: "example:qa", format: prompt-completion}
parallelism: {degrees: auto}
"""


def write(directory: Path, source: str) -> None:
    (directory / "run.yaml").write_text(RUN_FILE.replace("SOURCE", source))


def test_plan_shows_the_choice(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_3_8B))
    write(tmp_path, "./model")
    shown = call("plan", "run.yaml", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    table = shown.stdout.partition("degrees")[2].partition("\nsharding  ")[0].splitlines()
    chosen = next(line for line in table if line.startswith("*"))
    assert "dp 8 x tp 1" in chosen and "replicated" in chosen
    assert any("cp 2" in line for line in table), "others are shown too"
    assert "tensor 1 x pipeline 1 x context 1 x data 8" in shown.stdout
    planned = json.loads(call("plan", "run.yaml", "--json", cwd=tmp_path).stdout)
    assert planned["degrees"]["data_parallel"] == 8
    assert planned["engine"] == "torch"
    assert f"engine    torch, sft, lora, bf16 ({planned['engine_reason']})" in shown.stdout
    assert planned["proposal"]["layouts"][0]["degrees"] == "dp 8 x tp 1"
    # rendered, the run directory has the degrees, not the wish
    assert call("render", "run.yaml", cwd=tmp_path).returncode == 0
    frozen = (Path(tmp_path / planned["run_directory"]) / "run.yaml").read_text()
    assert "auto" not in frozen.partition("parallelism:")[2].partition("sharding")[0] and "engine: torch\n" in frozen


def test_without_accelerators_no_speed_is_shown(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_3_8B))
    write(tmp_path, "./model")
    local = ("--set=cluster.instance_type=local", "--set=parallelism.ranks_per_node=4")
    shown = call("plan", "run.yaml", *local, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    heading = next(line for line in shown.stdout.splitlines() if "degrees" in line and "rows a step" in line)
    assert "tokens/s" not in heading and "GiB" not in heading
    assert "tp 2" in shown.stdout, "others are shown too"


def test_config_json_is_fetched_first(tmp_path: Path) -> None:
    write(tmp_path, "org/model")
    repository = Repository({"config.json": json.dumps(LLAMA_3_8B).encode(), "model.safetensors": b"0" * 100})
    with serve({"org/model": repository, "org/empty": Repository({"README.md": b""})}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
        for _ in range(2):
            shown = call("plan", "run.yaml", cwd=tmp_path, **environment)
            assert shown.returncode == 0 and "dp 8 x tp 1" in shown.stdout, shown.stderr
        assert [name for name, _ in hub.fetched()] == ["config.json"], "once"
        line = refused("plan", "run.yaml", "--set=model.source=org/empty", cwd=tmp_path, **environment)
        assert "model.source: org/empty has no config.json" in line
    # from now on nothing is fetched
    assert call("plan", "run.yaml", cwd=tmp_path).returncode == 0
