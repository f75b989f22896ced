"""The pages of the first run: what they show of `init`'s run files, what they add, and how the clone is copied."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from hyperpod_ft.authoring.dataset_format import LocalFiles
from hyperpod_ft.authoring.draft import Draft
from hyperpod_ft.authoring.new_run import NewRun, new_run
from hyperpod_ft.config import run_file
from scripts.memory_table import QWEN3_8B
from tests.pages.blocks import ROOT, blocks, uncommented
from tests.pages.reader import environment
from tests.programs import write_program

CPUS, GPU, SLURM = (f"docs/first-run-{place}.md" for place in ("cpus", "gpu", "slurm"))
QWEN3_06B = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
REPOSITORIES = ["https://pip.repos.neuron.amazonaws.com", "https://download.pytorch.org/whl/cpu"]


def written(directory: Path, instance: str, model: dict[str, object]) -> Draft:
    """The run file of `init` for a model that is here, and rows like those of the pages."""
    (directory / "qwen").mkdir()
    (directory / "qwen" / "config.json").write_text(json.dumps(model))
    row = json.dumps({"question": "How many clips are 2 and 2?", "answer": "2 and 2 are 4.\n#### 4"}) + "\n"
    (directory / "questions.jsonl").write_text(row * 7473)
    wanted = NewRun(str(directory / "qwen"), str(directory / "questions.jsonl"), instance)
    return new_run(wanted, directory / "run.yaml")


def memory_said(page: str) -> str:
    """What a page quotes of the estimate in a run file."""
    (memory,) = re.findall(r"`(a step takes[^`]*)`", (ROOT / page).read_text(encoding="utf-8"))
    return " ".join(memory.split())


def test_readme_shows_what_init_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key that README shows, as its own command writes it; the Hub is not asked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _, _, *options = shlex.split(blocks("README.md")[0].splitlines()[0])
    given = dict(zip(options[::2], options[1::2], strict=True))
    draft = new_run(NewRun(given["--model"], given["--dataset"], given["--instance"]), tmp_path / "run.yaml")
    (shown,) = blocks("README.md", "yaml")
    for section, keys in yaml.safe_load(shown).items():
        for name in keys if isinstance(keys, dict) else [""]:
            key = f"{section}.{name}".rstrip(".")
            assert draft.get(key) == (keys[name] if name else keys), key


def test_the_page_for_cpus_shows_what_init_writes(tmp_path: Path) -> None:
    row = json.dumps({"question": "How do I list my jobs?", "answer": "squeue --me"}) + "\n"
    (tmp_path / "my-data.jsonl").write_text(row * 2)
    draft = new_run(NewRun("example:tiny-llama", str(tmp_path / "my-data.jsonl"), "local"), tmp_path / "run.yaml")
    (shown,) = blocks(CPUS, "yaml")
    assert shown in draft.text()


def test_the_page_for_a_gpu_says_what_init_writes(tmp_path: Path) -> None:
    draft = written(tmp_path, "g5.xlarge", QWEN3_06B)
    assert memory_said(GPU) in draft.text()
    check_typed(draft, *blocks(GPU, "yaml"))


@pytest.mark.parametrize("instance", ["p5.48xlarge", "trn1.32xlarge", "trn2.48xlarge"])
def test_the_run_file_fits_a_node_of_a_cluster(tmp_path: Path, instance: str) -> None:
    draft = written(tmp_path, instance, QWEN3_8B)
    assert draft.get("env.package_repositories") == (REPOSITORIES if instance.startswith("trn") else None)
    assert draft.get("engine") == {"p5": "auto", "trn1": "neuron", "trn2": "torch"}[instance.partition(".")[0]]
    if instance.startswith("p5"):
        assert memory_said(SLURM) in draft.text()
    if instance.startswith("trn2"):  # on systems that TorchNeuron does not know
        check_typed(draft, "engine: neuron")
    (typed,) = blocks(SLURM, "yaml")
    check_typed(draft, typed)
    check_typed(draft, uncommented(typed))


def check_typed(draft: Draft, typed: str) -> None:
    """What a page adds makes a valid run file."""
    values = dict(draft.values)
    for section, keys in yaml.safe_load(typed).items():
        values[section] = values[section] | keys if isinstance(keys, dict) else keys
    run_file.validate(values, "run.yaml")


def test_the_clone_is_copied_to_the_head_node(tmp_path: Path) -> None:
    """ssh stands in for itself: its command runs here."""
    (head_node := tmp_path / "home").mkdir()
    write_program(tmp_path / "bin" / "ssh", f'cd {head_node}; [[ $1 == HEAD_NODE ]]; bash -c "$2"')
    subprocess.run(["bash", "-c", blocks(SLURM)[0]], cwd=ROOT, env=environment(tmp_path), check=True)
    assert (head_node / "hyperpod-ft-src" / "constraints.txt").exists()


def test_a_csv_file_becomes_rows_that_init_recognizes(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('question,answer\n"2, and 2?",4\nAn é?,"two\nlines"\n', encoding="utf-8")
    (convert,) = blocks("docs/your-own-data.md")
    subprocess.run(["bash", "-c", convert], cwd=tmp_path, check=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == [{"question": "2, and 2?", "answer": "4"}, {"question": "An é?", "answer": "two\nlines"}]
    assert LocalFiles.of(tmp_path / "rows.jsonl", ["*.jsonl"], "train").format().keys["format"] == "template"
