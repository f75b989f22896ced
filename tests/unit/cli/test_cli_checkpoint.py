"""The commands on files as a newcomer meets them: the messages of mistakes, the output, the exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hyperpod_ft.checkpoint.kinds import kind_of
from hyperpod_ft.cli import checkpoint as cli_checkpoint
from hyperpod_ft.cli.main import app
from hyperpod_ft.errors import UserError, first_sentence
from tests.unit import tiny_checkpoints

CLI = [sys.executable, "-m", "hyperpod_ft"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, `adapter`, `merged`, and two sharded checkpoints; nothing else may be written there."""
    root = tmp_path_factory.mktemp("made")
    model = tiny_checkpoints.peft_model(tiny_checkpoints.base_model(root / "base"))
    checkpoint = root / "checkpoints" / "checkpoint-2"
    live = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    tiny_checkpoints.save_whole(checkpoint, live)
    model.save_pretrained(str(root / "adapter"))
    shutil.copy(root / "adapter" / "adapter_config.json", checkpoint)
    shutil.copytree(checkpoint, root / "checkpoints" / "checkpoint-10")
    run("merge", "--base", root / "base", "--adapter", root / "adapter", "-o", root / "merged")
    return root


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def refused(*arguments: object) -> str:
    with pytest.raises(UserError) as refusal:
        run(*arguments)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_kinds(made: Path, tmp_path: Path) -> None:
    kinds = {"base": "model", "adapter": "adapter", "merged": "model", "checkpoints": "other", "nothing": "missing"}
    kinds |= {"checkpoints/checkpoint-2": "sharded checkpoint", "base/config.json": "file"}
    assert {name: kind_of(made / name) for name in kinds} == kinds
    (tmp_path / "checkpoint-4" / "adapter_default" / "adapter_shards").mkdir(parents=True)
    (tmp_path / "checkpoint-4" / "adapter_default" / "adapter_config.json").touch()
    for path in ("checkpoint-4", "checkpoint-4/adapter_default", "checkpoint-4/adapter_default/adapter_shards"):
        assert kind_of(tmp_path / path) == "sharded checkpoint"


def test_consolidate_tells_mistakes(made: Path, tmp_path: Path) -> None:
    checkpoint, out = made / "checkpoints" / "checkpoint-2", tmp_path / "out"

    def refusal(*arguments: object, output: Path = out) -> str:
        return refused("consolidate", *arguments, "-o", output)

    assert "did you mean checkpoint-2, checkpoint-10?" in refusal(made / "checkpoints")
    assert "is an adapter, not a sharded checkpoint" in refusal(made / "adapter")
    assert "is a model, not a sharded checkpoint" in refusal(made / "base")
    assert "is a file" in refusal(made / "base" / "config.json")
    assert "no such directory" in refusal(made / "nothing")
    assert "--dtype: " in refusal(checkpoint, "--dtype", "bf16")
    assert "--max-shard-size: " in refusal(checkpoint, "--max-shard-size", "5GB")
    assert "--max-shard-size 5XB: " in refusal(checkpoint, "--max-shard-size", "5XB")
    assert "config.json: is not a directory" in refusal(checkpoint, output=made / "base" / "config.json" / "out")
    assert "is inside the input" in refusal(checkpoint, output=checkpoint / "out")
    assert "would replace" in refusal(checkpoint, output=made / "checkpoints")
    assert "is inside the input" in refusal(checkpoint, "--base", made / "base", output=made / "base" / "out")
    assert list(tmp_path.iterdir()) == []


def test_merge_tells_mistakes(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = made / "base", made / "adapter"

    def refusal(base: object, adapter: object, *more: object) -> str:
        return refused("merge", "--base", base, "--adapter", adapter, "-o", tmp_path / "out", *more)

    assert "--adapter" in refusal(base, made / "nothing") and "no such directory" in refusal(base, made / "nothing")
    assert "is a model, not an adapter" in refusal(base, base)
    assert "is a sharded checkpoint; run hyperpod-ft consolidate first" in refusal(
        base, made / "checkpoints" / "checkpoint-2"
    )
    assert "give the directory" in refusal(base, adapter / "adapter_config.json")
    assert "hf download meta-llama/Meta-Llama-3-8B" in refusal("meta-llama/Meta-Llama-3-8B", adapter)
    assert "no such directory; give the directory of a model" in refusal(made / "nothing", adapter)
    assert "is a file" in refusal(base / "config.json", adapter)
    assert "is an adapter, not a model" in refusal(adapter, adapter)
    assert "--weight: 2 for 1 adapter;" in refusal(base, adapter, "--weight", "1", "--weight", "2")
    assert "is inside the input" in refused("merge", "--base", base, "--adapter", adapter, "-o", adapter / "x")
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    assert f"{tmp_path}: is not writable" in refusal(base, adapter)
    monkeypatch.undo()

    def stopped(*_: object, **__: object) -> None:
        (tmp_path / ".out.partial").mkdir()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("hyperpod_ft.checkpoint.merge.merge.merge", stopped)
    result = CliRunner().invoke(app, ["merge", f"--base={base}", f"--adapter={adapter}", f"-o{tmp_path / 'out'}"])
    assert result.exit_code == 143
    assert f"stopped; finished files are in {tmp_path / '.out.partial'}: " in result.stderr


def test_results_are_told(made: Path, tmp_path: Path) -> None:
    checkpoint = made / "checkpoints" / "checkpoint-2"
    printed = run("consolidate", checkpoint, "-o", tmp_path / "adapter").splitlines()
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert printed[0].startswith(f"adapter default: rank 3, {len(tensors)} tensors, ")
    assert f" kB in 1 file -> {tmp_path / 'adapter'}, " in printed[0]
    assert printed[1] == f"next: hyperpod-ft merge --base BASE --adapter {tmp_path / 'adapter'} -o merged"
    merge = ("merge", "--base", made / "base", "--adapter", tmp_path / "adapter", "--dtype", "bf16", "-o")
    printed = run(*merge, tmp_path / "merged").splitlines()
    assert printed[0].startswith("14 of 21 tensors merged, ") and "in 1 file ->" in printed[0] and "MB/s" in printed[0]
    one = json.loads(run("consolidate", checkpoint, "-o", tmp_path / "again", "--json"))
    two = json.loads(run(*merge, tmp_path / "merged again", "--json", "--max-shard-size", "1MB"))
    keys = ["output", "kind", "tensors", "nbytes", "files", "seconds"]
    assert list(one) == keys and list(two)[: len(keys)] == keys
    assert (one["kind"], one["files"], two["kind"], two["merged"]) == ("adapter", 1, "model", 14)
    found = run("verify", tmp_path / "merged", "--against", made / "merged", "--tolerance", "1", code=1)
    assert "all 21 tensors are BF16, should be F32\n" in found and " kB in " in found


def test_verify_tells_mistakes(made: Path) -> None:
    merged, base, adapter = made / "merged", made / "base", made / "adapter"
    sharded = made / "checkpoints" / "checkpoint-2"

    def refusal(adapter: object, base: object) -> str:
        return refused("verify", merged, "--adapter", adapter, "--base", base)

    assert "--adapter is a model and --base an adapter; swap them" in refusal(base, adapter)
    assert "no such directory" in refusal(made / "nothing", base) and "no such directory" in refusal(
        adapter, made / "no"
    )
    assert "is a sharded checkpoint" in refusal(sharded, base) and "is an adapter, not a model" in refusal(
        adapter, adapter
    )
    assert "is a sharded checkpoint; run hyperpod-ft consolidate first" in refused("verify", sharded)
    assert "is an adapter, not a model" in refused("verify", merged, "--against", adapter)
    assert "--tolerance: applies to --against only" in refused("verify", merged, "--tolerance", "1")
    assert "--tolerance -1.0: " in refused("verify", merged, "--tolerance", "-1")
    assert "add --base" in refused("verify", merged, "--adapter", adapter)
    assert "is an adapter" in refused("verify", adapter, "--adapter", adapter, "--base", base)
    assert "is not a model or an adapter" in refused("verify", made)
    assert "is not a model" in refused("verify", merged, "--against", made)


def test_a_comparison_that_proves_nothing_does_not_pass(made: Path, tmp_path: Path) -> None:
    logits = ("--logits", "--adapter", made / "adapter", "--base", made / "base")
    assert "the adapter makes" in run("verify", made / "merged", *logits)
    shutil.copytree(made / "adapter", tmp_path / "zero")
    file = tmp_path / "zero" / "adapter_model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}, file)
    without = run("verify", made / "base", "--logits", "--adapter", tmp_path / "zero", "--base", made / "base", code=1)
    assert "cannot show whether the adapter" in without
    shutil.copytree(made / "base", tmp_path / "dead")
    file = tmp_path / "dead" / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.zeros(400, 32)}, file, {"format": "pt"})
    dead = run(
        "verify", tmp_path / "dead", "--logits", *("--adapter", made / "adapter", "--base", tmp_path / "dead"), code=1
    )
    assert "cannot show whether the adapter" in dead


def test_a_full_standard_output_and_an_interrupt_are_no_bugs(made: Path) -> None:
    for unbuffered in ("", "1"):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*CLI, "verify", str(made / "merged")],
                env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 2
        assert done.stderr.startswith("error: standard output") and done.stderr.count("\n") == 1, done.stderr
    # anywhere
    script = "import hyperpod_ft.cli.main as cli\ndef stop(): raise KeyboardInterrupt\ncli.app = stop\ncli.main()"
    interrupted = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (interrupted.returncode, interrupted.stderr) == (130, "")


def test_sizes_and_foreign_texts() -> None:
    assert [cli_checkpoint._shard_bytes(text) for text in ("5", "5GB", "1.5 gb", "200MB", None)] == [
        5_000_000_000, 5_000_000_000, 1_500_000_000, 200_000_000, 5_000_000_000,
    ]  # fmt: skip
    assert first_sentence(ValueError("\nNo model. Do this:\n- that")) == "No model"
    assert len(first_sentence(ValueError("x" * 999))) == 203
    assert first_sentence(KeyError()) == "KeyError"
