"""TensorBoard: event files below the run's directory, written without torch and TensorFlow.

All values of a row are one event, so that a kill leaves a row whole or not at all; readers ignore an event that was cut
off, and each process begins a file of its own. https://www.tensorflow.org/tensorboard
"""

import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from hyperpod_ft.tracking.trackers.interface import FINAL, Description, Row

_FLUSH_SECONDS = 3600  # `publish` flushes


class EventFiles:
    """A directory of event files."""

    def __init__(self, given: Description) -> None:
        self._directory = Path(given["directory"]) / "tensorboard"
        self._step, self._final = _read(self._directory)
        self._writer = EventFileWriter(str(self._directory), flush_secs=_FLUSH_SECONDS)
        if not self._step:
            self._add(0, [_text("run file", f"```yaml\n{given['yaml']}```")])

    @property
    def where(self) -> str:
        return str(self._directory)

    def step(self) -> int:
        return self._step

    def publish(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._add(int(row["step"]), _scalars(row))
        self._writer.flush()

    def publish_final(self, final: Row, step: int) -> None:
        if new := {name: value for name, value in final.items() if name not in self._final}:
            self._add(step, _scalars(new))
            self._writer.flush()

    def end(self, done: bool) -> None:
        self._writer.close()

    def _add(self, step: int, values: list[summary_pb2.Summary.Value]) -> None:
        self._writer.add_event(
            event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values))
        )


def open_run(given: Description) -> EventFiles:
    return EventFiles(given)


def _scalars(row: Row) -> list[summary_pb2.Summary.Value]:
    return [
        summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in sorted(row.items()) if name != "step"
    ]


def _text(tag: str, text: str) -> summary_pb2.Summary.Value:
    """A text as the dashboard of that name shows it: a tensor of one string."""
    metadata = summary_pb2.SummaryMetadata(plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"))
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    return summary_pb2.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)


def _read(directory: Path) -> tuple[int, set[str]]:
    """The newest step of all event files, and the names of the final figures in them."""
    step, final = 0, set()
    for file in directory.glob("events.out.tfevents.*"):
        for content in RawEventFileLoader(str(file)).Load():
            event = event_pb2.Event.FromString(content)
            step = max(step, event.step)
            final |= {value.tag for value in event.summary.value if value.tag.startswith(FINAL)}
    return step, final
