"""Python environments of stand-ins for AWS's packages.

Engine neuron's jobs compile and train nothing in theirs. `neuron_parallel_compile` is
tests/stand_ins/neuron_parallel_compile; the engine's trial only writes down how it was started, as `rank<N>.json` in
the run directory.

Engine torch's jobs train on the CPU in theirs, which they take for Trainium. torch.compile leaves a file in the cache
of compiled graphs for each graph that is not there, and runs the graph as it is.
"""

import shutil
import sys
from pathlib import Path

from hyperpod_ft import publish
from hyperpod_ft.launch.render import Installation, render
from hyperpod_ft.runs.records import Record, utc_now
from hyperpod_ft.runs.run import Run

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
REPOSITORY = Path(__file__).resolve().parents[1]

# Loaded by every interpreter of the job: an engine becomes the stand-in below.
SITE = """
import importlib.abc, importlib.util, sys
from pathlib import Path

class Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "hyperpod_ft.engines.ENGINE.loop":
            return importlib.util.spec_from_file_location(name, Path(__file__).with_name("stand_in_engine.py"))

sys.meta_path.insert(0, Patch())
"""
ENGINE = """
import json, os
from hyperpod_ft.errors import UserError

def precompile(task, ranks):
    if os.environ.get("STAND_IN_TRIAL") == "refuses":
        raise UserError("this cannot be traced", "correct it")
    names = ("NEURON_EXTRACT_GRAPHS_ONLY", "NEURON_CC_FLAGS", "WORLD_SIZE", "LOCAL_RANK")
    (task.directory / f"rank{ranks.rank}.json").write_text(json.dumps({name: os.environ[name] for name in names}))
    return {"trial_steps": task.config.neuron.precompile_steps}
"""

TORCH_ENGINE = """
import hashlib, importlib, os, struct
from pathlib import Path
import torch
from hyperpod_ft.engines import ranks
from hyperpod_ft.engines.torch import devices, mesh

ranks.device_of = lambda *_: torch.device("cpu")
devices.fixed_shapes = lambda device: True
compile_with = torch.compile

def compiled(graph, inputs):
    key = hashlib.sha256((graph.code + str([x.shape for x in inputs])).encode()).hexdigest()
    neff = Path(os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"], key[:2], key[2:4], key + ".neff")
    if not neff.exists():
        neff.parent.mkdir(parents=True, exist_ok=True)
        neff.write_bytes(struct.pack("<QQQ", 2, 1024, 4).ljust(1028, b"x"))
    return graph.forward

torch.compile = lambda function, **options: compile_with(function, **options | {"backend": compiled})
path = Path(mesh.__file__).with_name("loop.py")
exec(compile(path.read_text(), path, "exec"))
"""


def torch_environment(directory: Path) -> Path:
    """Make engine torch's environment in `directory`; gives its interpreter."""
    return environment(directory, "torch", TORCH_ENGINE)


def environment(directory: Path, engine: str = "neuron", module: str = ENGINE) -> Path:
    """Make the environment in `directory`; gives its interpreter, which is this one with the stand-ins."""
    programs, modules = directory / "bin", directory / "modules"
    programs.mkdir(parents=True)
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(SITE.replace("ENGINE", engine))
    (modules / "stand_in_engine.py").write_text(module)
    python = programs / "python"
    python.write_text(
        # the health of this node, which has no Neuron devices, is not asked for
        '#!/bin/bash\n[[ "$*" == "-m hyperpod_ft.job.health "* ]] && exit\n'
        f'export PYTHONPATH="{modules}:$PYTHONPATH"\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    shutil.copy(REPOSITORY / "tests" / "stand_ins" / "neuron_parallel_compile", programs)
    return python


def ready_for_precompile(run: Run) -> None:
    """Freeze the run, write its script of stage precompile, and call done what comes before it."""
    run.freeze()
    run.paths.logs.mkdir(parents=True)
    for stage in ("env", "download", "dataset"):
        finished = Record(stage, run.plan[stage].fingerprint, {}, (), {}, utc_now(), 0, "", "")
        finished.write(run.paths.record_path(stage))
    publish.write_json(run.paths.base_model / "config.json", CONFIG)
    publish.write_text(
        run.paths.script("precompile"), render(run, Installation(run.paths.python, REPOSITORY))["precompile"]
    )
