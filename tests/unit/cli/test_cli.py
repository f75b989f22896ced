"""The command as a user meets it: fast, one-line errors, generated references, and a wheel that works."""

import errno
import fcntl
import json
import os
import pkgutil
import pty
import signal
import struct
import subprocess
import sys
import termios
import zipfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hyperpod_ft.cli import main
from hyperpod_ft.cli.main import app
from hyperpod_ft.cli.output import show_runs
from hyperpod_ft.config import run_file
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.preflight import preview
from hyperpod_ft.runs.run import Run
from scripts.memory_table import LLAMA_3_8B
from tests.programs import call
from tests.unit.small_volume import small_volume

REPOSITORY = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "transformers", "datasets", "peft", "numpy", "huggingface_hub", "boto3", "pyarrow")


def refused(*arguments: str, cwd: Path, **environment: str) -> str:
    done = call(*arguments, cwd=cwd, **environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("recipe", run_file.recipes())
def test_init_then_plan(tmp_path: Path, recipe: str) -> None:
    assert call("init", recipe, cwd=tmp_path).returncode == 0
    plan = call("plan", "run.yaml", "--json", cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert json.loads(plan.stdout)["stages"][0]["name"] == "env"
    assert "exists" in refused("init", recipe, cwd=tmp_path)


def test_init_refuses_options_of_what_a_file_decides(tmp_path: Path) -> None:
    for option in ("--method=full", "--nodes=2", "--format=chat", "--split=train"):
        assert "edit the run file" in refused("init", "quickstart", option, cwd=tmp_path)
    for option, key in (("--method=full", "training.method"), ("--split=train", "dataset.split")):
        said = refused("init", "--from", "a.yaml", option, "--instance=local", cwd=tmp_path)
        assert option.partition("=")[0] in said and key in said


def answer(directory: Path, answers: str, *options: str, interrupted_at: str = "") -> tuple[int, str]:
    """`init` on a terminal, with these lines typed, and Ctrl-C at a question; its status, and what it printed."""
    keyboard, terminal = pty.openpty()
    command = [sys.executable, "-m", "hyperpod_ft", "init", *options]
    with subprocess.Popen(
        command, cwd=directory, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        assert run.stdout is not None
        os.write(keyboard, answers.encode())
        printed = b""
        while interrupted_at.encode() not in printed and (part := os.read(run.stdout.fileno(), 1 << 12)):
            printed += part
        if interrupted_at:
            run.send_signal(signal.SIGINT)
        printed += run.communicate(timeout=300)[0]
    for descriptor in (keyboard, terminal):
        os.close(descriptor)
    return run.returncode, printed.decode()


def test_init_asks_on_a_terminal_and_nowhere_else(tmp_path: Path) -> None:
    assert "--dataset" in refused("init", cwd=tmp_path)
    assert "--instance" in refused("init", "--model=example:tiny-llama", "--dataset=example:qa", cwd=tmp_path)
    status, printed = answer(tmp_path, "example:tiny-llama\nlocal\n", "--dataset=example:qa")
    assert status == 0, printed
    config = run_file.load(tmp_path / "run.yaml")
    assert (config.dataset.format, config.cluster.instance_type) == ("dolly", "local")


def test_init_asks_again_with_the_reason_and_loses_no_answer(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"sound": "la"}\n')
    answers = "./absent\nexample:tiny-llama\n./rows.jsonl\nexample:qa\np5\nlocal\n"
    status, printed = answer(tmp_path, answers)
    assert status == 0 and (tmp_path / "run.yaml").exists(), printed
    reasons = ("no such file or directory", "no format has the fields sound", "p5.48xlarge")
    assert [reason for reason in reasons if reason not in printed] == []
    status, printed = answer(tmp_path, "org/rows\nlocal\nsound\nchat\n", "-o", "b.yaml", "--model=example:tiny-llama")
    assert status == 0, printed
    assert run_file.load(tmp_path / "b.yaml").dataset.format == "chat", "asked for, since the rows are not here"
    status, printed = answer(tmp_path, "example:tiny-llama\nexample:qa\n", "-o", "c.yaml", interrupted_at="Instance")
    assert status == 1 and not (tmp_path / "c.yaml").exists()
    (line,) = [line for line in printed.splitlines() if "hyperpod-ft init" in line]
    options = line[line.index("hyperpod-ft init") :].split()[2:]
    assert options == ["-o", "c.yaml", "--model=example:tiny-llama", "--dataset=example:qa"]
    rows = ('{"instruction": "a", "response": "b"}', '{"instruction": "a"}')
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    status, printed = answer(tmp_path, "./rows.jsonl\nlocal\ndolly\n", "-o", "d.yaml", "--model=example:tiny-llama")
    assert status == 0 and "rows.jsonl:2" in printed, printed
    assert run_file.load(tmp_path / "d.yaml").dataset.format == "dolly", "asked for, since the rows differ"
    # an option is looked at before anything is asked
    status, printed = answer(tmp_path, "", "-o", "c.yaml", "--instance=p5")
    assert status == 2 and "p5.48xlarge" in printed and "Model" not in printed


def test_the_help_of_init_names_the_recipes() -> None:
    shown = "".join(CliRunner().invoke(app, ["init", "--help"]).output.split())  # lines break at hyphens
    assert all(recipe in shown for recipe in run_file.recipes())


def test_help_at_80_columns_names_every_command_once_with_a_whole_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root = typer.main.get_command(app)
    groups = {(): root} | {(name,): command for name, command in root.commands.items() if hasattr(command, "commands")}
    for path, group in groups.items():
        shown = CliRunner().invoke(app, [*path, "--help"]).output
        assert max(map(len, shown.splitlines())) <= 80
        for name, command in group.commands.items():
            assert shown.count(f"\n  {name}  ") == 1
            assert command.get_short_help_str(1000).replace(" ", "") in "".join(shown.split())
    assert len(groups) == 7


def test_a_table_in_a_pipe_is_as_wide_as_the_terminal_beside_it(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "hyperpod_ft", "plan", "qwen3-8b-lora-training-job"]
    for columns, fits in ((80, True), (0, False)):  # 0: its size is not known
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=terminal, text=True, check=True)
        table = done.stdout[done.stdout.index("stage ") :].splitlines()
        assert (max(len(line.rstrip()) for line in table) <= 80) == fits, done.stdout
    for descriptor in (master, terminal):
        os.close(descriptor)


def test_flagship_layout(tmp_path: Path) -> None:
    plan = json.loads(call("plan", "llama3-8b-dolly-lora-trn1", "--json", cwd=tmp_path).stdout)
    degrees = plan["degrees"]
    assert (degrees["tensor_parallel"], degrees["data_parallel"], degrees["world_size"]) == (8, 4, 32)
    config = run_file.load(run_file.find("llama3-8b-dolly-lora-trn1"))
    assert (config.lora.r, config.training.gradient_accumulation_steps, config.training.epochs) == (16, 3, 3)


def test_plan_tells_the_memory_of_a_model_that_is_here(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_3_8B))
    here = [f"--set=cluster.root={tmp_path}", f"--set=model.source={tmp_path / 'model'}", "--set=model.revision=null"]
    arguments = "plan", "llama3-8b-full-trn1", *here
    plan = call(*arguments, cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert "memory    9.7 GiB per rank (weights 1.9, gradients 4.7," in plan.stdout
    memory = json.loads(call(*arguments, "--json", cwd=tmp_path).stdout)["memory"]
    assert sum(memory["bytes"].values()) < memory["available_bytes"] == 16 * 2**30 * 0.9
    refusal = refused(*arguments, "--set=parallelism.tensor_parallel=4", cwd=tmp_path)
    assert "this would fit, with 9.7 GiB: parallelism.tensor_parallel: 8" in refusal
    unknown = call("plan", "llama3-8b-full-trn1", "--json", cwd=tmp_path)
    assert json.loads(unknown.stdout)["memory"] is None, "no model is here"
    shown = call("plan", "llama3-8b-full-trn1", cwd=tmp_path).stdout
    assert "not looked at: meta-llama/Meta-Llama-3-8B" in shown and "not looked at" not in plan.stdout


def test_plan_tells_what_ranks_do_beside_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("trl.use_vllm=true", "cluster.instance_type=p5.48xlarge", f"cluster.root={tmp_path}")
    plan = call("plan", "quickstart-grpo", *(f"--set={change}" for change in changes), cwd=tmp_path)
    assert "answers   every rank trains, and samples with vLLM in 0.3 of its GPU's memory" in plan.stdout
    assert "available: 48.0 (estimated)" in plan.stdout
    every = [f"cluster.root={tmp_path}", "training.memory_checkpoint_every_steps=2"]
    show_runs.plan(preview(Run.of(run_file.load(run_file.find("quickstart"), every)), Launchers()))
    assert "memory    memory checkpoints take 10.2 MB of each node's /dev/shm (estimated)" in capsys.readouterr().out


def test_errors_are_one_line(tmp_path: Path) -> None:
    degrees = ("--set", "parallelism.tensor_parallel=8", "--set", "parallelism.ranks_per_node=8")
    (tmp_path / "file").touch()
    for arguments, facts in (
        (("plan", "nothing.yaml"), ("nothing.yaml", "hyperpod-ft init", "quickstart")),
        (("plan", "quickstart", "--set", "training.learning_rat=1"), ("learning_rat", "learning_rate?")),
        (("plan", "quickstart", *degrees), ("tensor_parallel: 8", "4 attention heads")),
        (("init", "x"), ("'x'", "quickstart")),
        (("init", "quickstart", "-o", "absent/run.yaml"), ("absent/run.yaml", "-o")),
        (("cluster", "init", "-o", "absent/cluster.yaml"), ("absent/cluster.yaml", "-o")),
        (("status",), ("no run", "run directory")),
        (("status", str(tmp_path)), (str(tmp_path), "run.yaml", "hyperpod-ft list")),
        (("submit", "quickstart", "--launcher", "x"), ("--launcher x", "slurm, process")),
        (("submit", "quickstart", "--set", f"cluster.root={tmp_path / 'file'}"), ("cluster.root", f"{tmp_path}/file")),
    ):
        error = refused(*arguments, cwd=tmp_path)
        assert all(fact in error for fact in facts), error


def test_every_command_says_what_to_do_without_slurm(tmp_path: Path) -> None:
    """Slurm's programs are installed, and no cluster is configured: this is what they say then."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel"):
        (programs / name).write_text(
            f"#!/bin/sh\necho '{name}: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host' >&2\n"
            f"echo '{name}: fatal: Could not establish a configuration source' >&2\nexit 1\n"
        )
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}

    def names_both(text: str) -> bool:
        return "hyperpod-ft local up" in text and "--launcher process" in text

    assert names_both(refused("submit", "quickstart", cwd=tmp_path, **environment))
    (run_file_,) = tmp_path.glob("**/run.yaml")
    run = str(run_file_.parent)
    assert "nothing to cancel" in call("cancel", run, cwd=tmp_path, **environment).stdout
    # jobs of a Slurm that this machine cannot reach
    jobs = [{"stage": "env", "job_id": "7", "launcher": "slurm", "submitted": "2026-01-01T00:00:00Z"}]
    Path(run, "jobs.json").write_text(json.dumps(jobs))
    for command in ("submit", "quickstart"), ("resume", run), ("cancel", run):
        assert names_both(refused(*command, cwd=tmp_path, **environment)), command
    for command in ("status", run), ("logs", run), ("list", str(Path(run).parents[2])):
        done = call(*command, cwd=tmp_path, **environment)
        assert names_both(done.stdout), (command, done.stdout, done.stderr)


def test_a_full_volume_is_named_not_the_file_that_was_copied(tmp_path: Path) -> None:
    with small_volume(tmp_path / "small", 200 << 10):
        root = tmp_path / "small" / "root"
        error = refused("render", "quickstart", "--set", f"cluster.root={root}", cwd=tmp_path)
        assert str(root) in error and "No space left on device" in error
        assert not [path for path in root.glob("code/*") if path.is_dir()]


def test_an_error_of_the_volume_that_names_no_file_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(main, "app", fails)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err == "error: standard output, or a file: Input/output error; free or repair the volume\n"
    )


def test_render_writes_scripts_only_where_told(tmp_path: Path) -> None:
    done = call("render", "quickstart", "-o", "scripts", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"scripts"}
    assert (tmp_path / "scripts" / "train.sbatch").read_text().startswith("#!/bin/bash\n#SBATCH")


def test_render_without_a_directory_prepares_the_run(tmp_path: Path) -> None:
    scripts = call("render", "quickstart", cwd=tmp_path).stdout.split("\n")[:-1]
    assert len(scripts) == 8
    assert Path(scripts[0]).parent.with_name("run.yaml").is_file()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "quickstart"], ["render", "quickstart", "-o", "x"], ["local", "status"]]
)
def test_the_head_node_imports_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    program = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('heavy:', [m for m in {HEAVY!r} if m in sys.modules]))\n"
        "from hyperpod_ft.cli.main import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("heavy: []\n"), done.stdout


def test_references_are_up_to_date() -> None:
    """`python scripts/reference.py` regenerates them."""
    program = "import reference; print([p.name for p, text in reference.pages().items() if p.read_text() != text])"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "scripts"), "COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_wheel_carries_what_it_needs(tmp_path: Path) -> None:
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]  # with this hatchling
    subprocess.run([sys.executable, "-m", *build, "--wheel-dir", tmp_path, REPOSITORY], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    done = call("render", "quickstart", "-o", "scripts", cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'site'}" in (tmp_path / "scripts" / "train.sbatch").read_text(), "not this checkout's code"


def test_nothing_outside_the_jobs_imports_anything_heavy() -> None:
    names = [module.name for module in pkgutil.iter_modules([str(REPOSITORY / "hyperpod_ft")]) if not module.ispkg]
    modules = ", ".join(
        f"hyperpod_ft.{name}" for name in [*names, "engines.metrics", "engines.sanity"] if name != "__main__"
    )
    program = f"import sys, {modules}; print([module for module in {HEAVY!r} if module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
