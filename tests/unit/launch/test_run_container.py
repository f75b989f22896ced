"""Jobs in a container: what their scripts give to srun, which images and paths are refused, and which launchers."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hyperpod_ft.cli.main import app
from hyperpod_ft.config import run_file, yaml_file
from hyperpod_ft.errors import UserError
from hyperpod_ft.launch import container, preflight, torch_neuron
from hyperpod_ft.launch.launchers import Launchers
from hyperpod_ft.launch.preflight import check_run
from hyperpod_ft.launch.render import render
from hyperpod_ft.launch.slurm.site import SlurmSite
from hyperpod_ft.launch.submit import submit
from hyperpod_ft.runs.records import Record, utc_now
from hyperpod_ft.runs.run import Run
from hyperpod_ft.runs.selection import Selection
from tests import golden
from tests.conftest import MakeRun
from tests.programs import write_program
from tests.unit.launch.test_render import INSTALLATION, of_recipe, without_names

IMAGE = "registry.example/neuron/torch:2.14-ubuntu26.04"
RECIPE = "llama3-8b-lora-trn2"


def contained(recipe: str = RECIPE) -> Run:
    return with_section("env", {"container": IMAGE, "container_mounts": ["/fsx/cache"]}, recipe)


def with_section(name: str, content: dict[str, Any], recipe: str = RECIPE) -> Run:
    values = yaml_file.parse(run_file.RUN_FILE, run_file.find(recipe))
    values[name] = values.get(name, {}) | content
    return Run.of(run_file.resolve(run_file.validate(values, recipe), Path("/")))


def test_scripts_in_a_container_differ_from_the_same_without_as_recorded(tmp_path: Path) -> None:
    base = render(of_recipe(RECIPE), INSTALLATION)
    text = "".join(
        f"== {stage}\n{golden.difference(without_names(base[stage]), without_names(script))}"
        for stage, script in render(contained(), INSTALLATION).items()
        if stage in ("env", "train", "generate")
    )
    scripts = [tmp_path / stage for stage in ("env", "train", "generate")]
    for script in scripts:
        script.write_text(render(contained(), INSTALLATION)[script.name])
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    golden.check(Path(__file__).parent / "golden" / "container.diff", text)


@pytest.mark.parametrize(("recipe", "devices"), [("llama3-8b-dpo-p5", "all"), (RECIPE, "void")])
def test_only_jobs_that_use_gpus_ask_for_their_drivers(recipe: str, devices: str) -> None:
    """Whatever the image asks for: enroot's hook fails on nodes without them."""
    scripts = render(contained(recipe), INSTALLATION)
    found = {
        stage: re.findall("^export NVIDIA_VISIBLE_DEVICES=(.*)", text, re.MULTILINE) for stage, text in scripts.items()
    }
    assert found["train"] == found["generate"] == [devices]
    assert all(found[stage] == ["void"] for stage in ("env", "certify", "dataset", "consolidate"))
    named = re.search("--container-env=(.*)", scripts["train"])
    assert named and "NVIDIA_VISIBLE_DEVICES" in named[1]
    assert ("NVIDIA_DRIVER_CAPABILITIES" in named[1]) == (devices == "all")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("docker://public.ecr.aws#neuron/torch:2", "docker://public.ecr.aws#neuron/torch:2"),
        ("host:5000/torch:2", "docker://host:5000#torch:2"),
        ("nvidia/cuda:13", "docker://nvidia/cuda:13"),
        (f"host:5000/x:1@sha256:{'0' * 64}", f"docker://host:5000#x:1@sha256:{'0' * 64}"),
        (f"org/x@sha256:{'0' * 64}", f"docker://org/x@sha256:{'0' * 64}"),
    ],
)
def test_an_image_is_named_as_enroot_reads_it(make_run: MakeRun, given: str, read: str) -> None:
    image = make_run(env={"container": given}).config.env.container
    assert image and container.registry_uri(image) == read


@pytest.mark.parametrize(
    "env",
    [
        {"container": "public.ecr.aws/neuron/torch"},  # of no version
        {"container": "images/torch.sqsh"},
        {"container": "org/x:1@sha256:0123"},
        {"container": "org/x:1 --container-save=/etc/x"},
        {"container_mounts": ["/fsx/cache"]},
        {"container": "a/b:1", "python": "current"},  # that of the head node
    ],
)
def test_what_is_no_image_is_refused(make_run: MakeRun, env: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"env\.container|container_mounts") as error:
        make_run(env=env)
    assert len(str(error.value).splitlines()) == 1


def test_the_evaluation_of_a_container_has_no_interpreter_of_the_head_node(make_run: MakeRun) -> None:
    config = make_run(env={"container": "a/b:1"}).config
    with pytest.raises(UserError, match=r"eval\.python: current is not in env\.container"):
        run_file.with_evaluation(config, {"tasks": ["arc_easy"], "python": "current"}, Path("/"))


def test_an_image_is_part_of_the_environment_and_not_of_the_training(make_run: MakeRun) -> None:
    plain, first, second = (make_run(env=env).plan for env in ({}, {"container": "a/b:1"}, {"container": "a/b:2"}))
    assert len({plan["env"].fingerprint for plan in (plain, first, second)}) == 3
    assert plain.run_id == first.run_id == second.run_id


def test_what_cannot_run_is_refused_before_a_job_starts(make_run: MakeRun, tmp_path: Path) -> None:
    lost = str(tmp_path / "lost.sqsh")
    with pytest.raises(UserError, match=r"env\.container: no such file: .*lost\.sqsh"):
        check_run(make_run(env={"container": lost}))
    check_run(make_run(env={"container": "/no/volume/x.sqsh"}, cluster__root="/no/volume/kit"))
    with pytest.raises(UserError, match=r"contains ' ', which Pyxis cannot mount"):
        check_run(make_run(env={"container": "a/b:1", "container_mounts": ["/fsx/two words"]}))
    with pytest.raises(UserError, match=r"env\.container: launcher process starts nothing in it; .*Slurm"):
        submit(make_run(env={"container": "a/b:1"}), Launchers(), Selection(), "process")


def test_a_job_sees_only_the_files_that_it_reads(make_run: MakeRun, tmp_path: Path) -> None:
    """Model and data are below the root by then, and their user may have removed the originals."""
    (tmp_path / "reward.py").write_text("def score(prompt, completion, /, **columns): return 1.0\n")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "quiz.yaml").write_text("task: quiz\n")
    run = make_run(
        engine="trl",
        cluster__instance_type="p5.48xlarge",
        parallelism__tensor_parallel=1,
        parallelism__ranks_per_node=8,
        training__objective="grpo",
        dataset__format="prompt",
        dataset__source=str(tmp_path / "rows.jsonl"),
        dataset__revision=None,
        reward=[{"function": f"{tmp_path}/reward.py:score"}],
        eval={"tasks": ["quiz"], "include_path": str(tmp_path / "tasks")},
        env={"container": IMAGE},
    )
    root = run.config.root
    always = {f"{root}:{root}", f"{root}:{container.ONLY_INSIDE}"}
    own = {"reward": f"{tmp_path}/reward.py", "tasks": f"{tmp_path}/tasks"}
    for job in ("env", "dataset", "train", "eval", "serve", *own):
        read = {f"{own[job]}:{own[job]}"} if job in own else set()
        assert set(container.mounts(run.config, job).split(",")) == always | read


def test_a_head_node_without_pyxis(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = "echo \"srun: unrecognized option '--container-image=none'\" >&2; exit 1"
    write_program(tmp_path / "srun", f'[[ "$*" == --version ]] && exit 0; {unknown}')
    write_program(tmp_path / "sbatch", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert SlurmSite().configured
    with pytest.raises(UserError, match=r"srun has no --container-image: .*unrecognized option.*load Pyxis"):
        check_run(make_run(env={"container": "a/b:1"}))
    write_program(tmp_path / "srun", "exit 0")
    check_run(make_run(env={"container": "a/b:1"}))


@pytest.mark.parametrize(
    ("system", "refused"),
    [(("ubuntu", "24.04"), True), (("amzn", "2023"), True), (("ubuntu", "26.04"), False), (("ubuntu", "26.10"), False)],
)
def test_torch_neuron_needs_a_system_or_a_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: tuple[str, str], refused: bool
) -> None:
    """On a head node of HyperPod, whose nodes have its system. The recipe as it is, and with the way that it names."""
    names = dict(zip(("ID", "VERSION_ID"), system, strict=True)) | {"PRETTY_NAME": " ".join(system)}
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: names)
    monkeypatch.setattr(torch_neuron, "of_machine_image", lambda: None)
    monkeypatch.setattr(preflight, "HYPERPOD", tmp_path)
    if refused:
        with pytest.raises(UserError, match=r"env: this machine has .*Ubuntu 26\.04; set env\.container"):
            check_run(of_recipe(RECIPE))
    else:
        check_run(of_recipe(RECIPE))
    check_run(contained())
    assert bool(torch_neuron.problem_here(of_recipe(RECIPE).config)) == refused
    assert not torch_neuron.problem_here(with_section("cluster", {"cpu_partition": "c7i"}).config), "its own system"
    check_run(
        with_section(
            "sagemaker", {"role": "arn:aws:iam::123456789012:role/x", "region": "us-east-2", "store": "s3://bucket"}
        )
    )


def test_a_replay_asks_slurm_for_a_node_of_the_training(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it has one: inside an allocation, srun takes that."""
    cluster = {"root": str(tmp_path), "instance_type": "p5.48xlarge", "partition": "p5", "account": "team"}
    run = make_run(env={"container": str(tmp_path / "x.sqsh")}, cluster=cluster, parallelism={})
    run.freeze()
    Record("env", run.plan["env"].fingerprint, {}, (), {}, utc_now(), 0.0, "", "").write(run.paths.record_path("env"))
    started = list[list[str]]()
    monkeypatch.setattr("os.execvpe", lambda _, command, __: started.append(command))
    for job in ("", "7"):
        monkeypatch.chdir("/")
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        if job:
            monkeypatch.setenv("SLURM_JOB_ID", job)
        done = CliRunner().invoke(app, ["replay", str(run.paths.directory), "--step", "1"])
        assert done.exit_code == 0, done.output
    (outside, inside) = [{option for option in command if option.startswith("--")} for command in started]
    asked = {"--partition=p5", "--account=team", "--exclusive", "--mem=0", "--time=1-00:00:00"}
    assert outside - inside == asked and not inside - outside


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        # of Pyxis 0.24, enroot 4.1 and srun 22.05
        (
            "slurmstepd-node1: error: pyxis: child 26876 failed with error code: 1\n"
            "slurmstepd-node1: error: pyxis: failed to create container filesystem for image: /x.sqsh\n"
            "slurmstepd-node1: error: pyxis: printing enroot log file:\n"
            "slurmstepd-node1: error: pyxis:     [ERROR] No such file or directory: /x.sqsh\n"
            "slurmstepd-node1: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1\n"
            "srun: error: node1: task 0: Exited with exit code 1\n",
            "No such file or directory: /x.sqsh",
        ),
        (
            "slurmstepd-node1: error: pyxis: failed to import docker image: docker://registry.invalid#a/b:1\n"
            "slurmstepd-node1: error: pyxis:     [INFO] Querying registry for permission grant\n"
            "slurmstepd-node1: error: pyxis:     curl: (6) Could not resolve host: registry.invalid\n"
            "slurmstepd-node1: error: Failed to invoke spank plugin stack\n",
            "curl: (6) Could not resolve host: registry.invalid",
        ),
        ("Traceback:\nModuleNotFoundError: No module named 'x'\nsrun: error: n: task 0: Exited with exit code 1\n", ""),
        ("pip\nerror: env: interpreter: no index\nsrun: error: n1: task 0: Exited with exit code 2", ""),
    ],
)
def test_the_line_that_says_why(messages: str, line: str) -> None:
    assert container.telling(messages) == line or messages.splitlines()[-2].endswith(container.telling(messages))
