"""docs/your-own-data.md, followed to the letter: its rows, its YAML and its commands, on plain processes."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from tests.pages.blocks import blocks
from tests.training.conftest import kit

PAGE = "docs/your-own-data.md"
STEPS = 3
CAPITALS = """France Paris, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna, Germany Berlin, Norway Oslo,
Sweden Stockholm, Denmark Copenhagen, Finland Helsinki, Poland Warsaw, Hungary Budapest, Greece Athens, Japan Tokyo,
China Beijing, India Delhi, Egypt Cairo, Kenya Nairobi, Peru Lima, Chile Santiago, Cuba Havana, Canada Ottawa"""

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]


def test_the_page_trains_a_newcomers_file(tmp_path: Path) -> None:
    rows, _ = blocks(PAGE, "json")  # test_learning_to_call.py trains the conversation
    capitals = [pair.split() for pair in CAPITALS.split(",")]
    own = [json.dumps({"question": f"What is the capital of {land}?", "answer": city}) for land, city in capitals]
    (tmp_path / "questions.jsonl").write_text("\n".join([rows.strip(), *own, ""]), encoding="utf-8")
    commands = [shlex.split(line)[1:] for block in blocks(PAGE) for line in block.splitlines()]
    (recipe,) = (number for number, command in enumerate(commands) if command[:2] == ["init", "quickstart"])
    for command in commands[: recipe + 1]:
        kit(*command, cwd=tmp_path)
    rest = commands[recipe + 1 :]
    run_file = tmp_path / commands[recipe][commands[recipe].index("-o") + 1]
    sections, _several, pattern = map(yaml.safe_load, blocks(PAGE, "yaml"))
    sections["generate"] |= pattern["generate"]
    values = yaml.safe_load(run_file.read_text(encoding="utf-8")) | sections
    run_file.write_text(yaml.safe_dump(values), encoding="utf-8")
    # a Slurm may be missing here, and the recipe's epochs on four ranks would take minutes
    changes = [f"training.max_steps={STEPS}", "cluster.nodes=1", "parallelism.tensor_parallel=1"]
    changes.append("parallelism.ranks_per_node=1")
    shorter = ["--launcher", "process", *(word for change in changes for word in ("--set", change))]
    output = {command[0]: kit(*command, *shorter * (command[0] == "submit"), cwd=tmp_path) for command in rest}
    assert "tuned model" in output["submit"] and "merged" in output["submit"]
    (run,) = tmp_path.glob(".quickstart/runs/*/*")
    trained = json.loads((run / "records" / "train.json").read_text(encoding="utf-8"))["facts"]
    assert trained["steps"] == STEPS and trained["final_loss"] < trained["first_loss"]
    samples = json.loads((run / "samples.json").read_text(encoding="utf-8"))
    assert sections["generate"]["prompts"][0]["question"] in samples["prompts"][0]["prompt"]
    assert json.loads(kit("status", "--json", cwd=tmp_path))["state"] == "done"
    (submit,) = (command for command in rest if command[0] == "submit")
    assert "Nothing to submit" in kit(*submit, *shorter, cwd=tmp_path)
    assert str(len(own) + len(rows.splitlines())) in output["logs"], "the rows that the dataset stage read"
