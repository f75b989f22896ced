"""Run: one execution of a plan. What it is, where it lies, and what happened."""

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hyperpod_ft import publish
from hyperpod_ft.config import prompt_images, run_file, sources, yaml_text
from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.digests import file_sha256, text_sha256
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.automatic.choice import Proposal, propose
from hyperpod_ft.planning.engine_rules import limits_of
from hyperpod_ft.planning.parallelism import on_nodes
from hyperpod_ft.planning.plan import Plan, plan
from hyperpod_ft.runs import job_files
from hyperpod_ft.runs.assets import model_config, with_adapter
from hyperpod_ft.runs.journal import Journal
from hyperpod_ft.runs.run_paths import RunPaths


@dataclass(frozen=True)
class _Planned(Plan):
    """plan.json: the plan, and the values of run.yaml, since JSON is read in a hundredth of the time."""

    config: dict[str, Any] = field(default_factory=dict)
    run_file_sha256: str = ""  # of the run.yaml that has these values
    replaced_sha256: str = ""  # of the one before it, which a kill between the two files leaves

    def config_of(self, frozen: Path) -> RunConfig:
        """The config in run.yaml, which may have been edited since. Raises UserError."""
        with contextlib.suppress(OSError):  # reading it again gives the user's error
            if file_sha256(frozen) in (self.run_file_sha256, self.replaced_sha256):
                return run_file.validate(self.config, str(frozen))
        return run_file.open_frozen(frozen)


_PLANNED = TypeAdapter(_Planned)


@dataclass(frozen=True)
class Run:
    """A resolved run file and its plan. A function that needs only its plan, paths or journal takes that instead."""

    config: RunConfig
    plan: Plan
    proposal: Proposal | None = field(default=None, compare=False)  # of degrees, if they were just chosen
    nodes_wanted: int = field(default=0, compare=False)  # if this job has fewer

    @cached_property
    def paths(self) -> RunPaths:
        return RunPaths(self.config, self.plan)

    @cached_property
    def journal(self) -> Journal:
        return Journal(self.paths, self.plan)

    @classmethod
    def of(cls, config: RunConfig) -> "Run":
        """The run of a resolved run file; with `parallelism.degrees: auto` its config has the degrees chosen.

        Raises UserError when the degrees do not divide, or cannot be chosen, and as `with_adapter` does.
        """
        config = with_adapter(config)
        if config.parallelism.degrees == "manual":
            return cls(config, plan(config))
        limits_of(config.engine).check_settings(config)
        proposal = propose(config, model_config(config))
        return cls(proposal.chosen.config, plan(proposal.chosen.config), proposal)

    @classmethod
    def open(cls, directory: Path) -> "Run":
        """The run in a run directory, as it was planned: another version of the kit may plan it differently.

        In a job that may have fewer nodes (cluster.min_nodes), on those that it has.
        Raises UserError when it is not a run directory, is damaged, or was moved away from its root.
        """
        frozen = directory / "run.yaml"
        if not frozen.is_file():
            raise UserError(f"{directory}: no run.yaml in it", "give a run directory; `hyperpod-ft list` shows them")
        try:
            planned = _PLANNED.validate_json((directory / "plan.json").read_bytes())
        except (FileNotFoundError, ValueError) as error:
            raise UserError(
                f"{directory}: its plan.json is missing or damaged", f"submit {frozen} as a run file"
            ) from error
        except OSError as error:
            raise UserError(
                f"{directory}: its plan.json cannot be read: {error.strerror}", "repair the volume, then resume"
            ) from error
        config = planned.config_of(frozen)
        with contextlib.suppress(UserError):  # stage download refuses such an adapter
            config = with_adapter(config)
        run = cls(config, Plan(planned.stages, planned.degrees))
        described = run.paths.directory
        if described != directory and described.resolve() != directory.resolve():
            raise UserError(
                f"{frozen}: was edited or moved: it describes the run {described}",
                f"submit it as a run file: hyperpod-ft submit {frozen}",
            )
        nodes = int(os.environ.get(job_files.NODES, "0")) if config.cluster.min_nodes else 0
        return run.on_nodes(nodes) if nodes else run

    def on_nodes(self, nodes: int) -> "Run":
        """The same on so many nodes; a step keeps its rows. Raises UserError when that is not possible."""
        wanted = self.plan.degrees.nodes
        if nodes == wanted:
            return self
        config = on_nodes(self.config, self.plan.degrees, nodes)
        return Run(config, plan(config), nodes_wanted=wanted)

    def freeze(self) -> None:
        """Write what `open` reads. Makes the directory; its run.yaml, which makes it a run's, comes last.

        A kill between the two files leaves the new plan with its values, and the next `freeze` completes it. Raises
        UserError for a picture of a prompt that has changed before the run had its copy.
        """
        self._copy_pictures()
        text = yaml_text.dump(self.config)
        frozen = self.paths.config_path
        values = {
            "run_file_sha256": text_sha256(text),
            "replaced_sha256": file_sha256(frozen) if frozen.exists() else "",
            "config": self.config.model_dump(mode="json"),
        }
        publish.write_json(self.paths.plan_path, self.plan.as_dict() | values)
        publish.write_text(frozen, text)

    def _copy_pictures(self) -> None:
        """Those of prompts, which stage generate reads: the user may change or remove them during the training."""
        for number, prompt in enumerate(self.config.generate.prompts if self.config.dataset.images else ()):
            for image in filter(prompt_images.is_pinned, prompt_images.of(prompt)):
                copy, where = self.paths.prompt_images / image["revision"], f"generate.prompts.{number}"
                if not copy.exists():
                    _copy_picture(where, image["source"], image["revision"], copy)


def _copy_picture(where: str, source: str, revision: str, target: Path) -> None:
    """Publish the copy that was checked, for those alone who may read the file. Raises UserError."""
    with tempfile.TemporaryDirectory() as own:
        copy = Path(own, Path(source).name)
        with contextlib.suppress(FileNotFoundError):  # said below
            shutil.copy2(source, copy)
        sources.resolve_path(where, source, where, revision, Path("/"), copy)
        prompt_images.check_file(where, copy)
        mode = copy.stat().st_mode & 0o666
        publish.write_bytes(target, copy.read_bytes(), mode | 0o600)
