"""MLflow: the server or store of MLFLOW_TRACKING_URI; without it, files in `mlruns` below `cluster.root`."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from hyperpod_ft.tracking.trackers.interface import Description, Row

_KEY = "hyperpod_ft.key"  # tag by which a run is found again
_LONGEST_PARAMETER = 6000  # characters; mlflow.utils.validation
_BATCH = 100  # parameters in one request, likewise


class MlflowRun:
    """A run of an experiment. A store may keep a part of a row when it is killed, so each metric has its own step."""

    def __init__(self, given: Description) -> None:
        address = os.environ.get("MLFLOW_TRACKING_URI") or (Path(given["root"]) / "mlruns").as_uri()
        if address.startswith(("file:", "/")):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow 3 wants to be asked
        self._client = MlflowClient(address)
        self._address = address
        experiment = self._experiment(given["project"])
        found = self._client.search_runs([experiment], f"tags.`{_KEY}` = '{given['key']}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {_KEY: given["key"], "mlflow.source.name": "hyperpod-ft"}
            self._id = self._client.create_run(experiment, tags=tags, run_name=given["name"]).info.run_id
        self._experiment_id = experiment
        run = self._client.get_run(self._id)
        self._known, self._latest = self._last_steps(run), run.data.metrics
        self._add_parameters(given, run)

    @property
    def where(self) -> str:
        page = f"/#/experiments/{self._experiment_id}/runs/{self._id}" if self._address.startswith("http") else ""
        return self._address.rstrip("/") + page

    def step(self) -> int:
        # `publish` leaves out what of a row is there
        return max(0, min((step for name, step in self._known.items() if "/" not in name), default=0))

    def publish(self, rows: Sequence[Row]) -> None:
        metrics = [
            _metric(name, value, int(row["step"]))
            for row in rows
            for name, value in row.items()
            if name != "step" and row["step"] > self._known.get(name, 0)
        ]
        for start in range(0, len(metrics), 1000):  # of one request
            self._client.log_batch(self._id, metrics=metrics[start : start + 1000])

    def publish_final(self, final: Row, step: int) -> None:
        metrics = [_metric(name, value, step) for name, value in final.items() if self._latest.get(name) != value]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, done: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if done else "KILLED")

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run was faster
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _last_steps(self, run: Run) -> dict[str, int]:
        histories = {name: self._client.get_metric_history(self._id, name) for name in run.data.metrics}
        return {name: max(metric.step for metric in history) for name, history in histories.items()}

    def _add_parameters(self, given: Description, run: Run) -> None:
        parameters = [
            Param(name, str(value)[:_LONGEST_PARAMETER])
            for name, value in given["config"].items()
            if name not in run.data.params  # they cannot be changed
        ]
        for start in range(0, len(parameters), _BATCH):
            self._client.log_batch(self._id, params=parameters[start : start + _BATCH])
        if not run.data.tags.get("hyperpod_ft.run"):
            self._client.log_batch(self._id, tags=[RunTag("hyperpod_ft.run", given["name"])])


def open_run(given: Description) -> MlflowRun:
    return MlflowRun(given)


def _metric(name: str, value: float, step: int) -> Metric:
    return Metric(name, value, int(time.time() * 1000), step)
