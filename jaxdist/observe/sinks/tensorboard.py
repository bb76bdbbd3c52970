"""Files of events for TensorBoard, in tensorboard/ of a run directory. Its package is imported on opening."""

import io
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.files.regular import open_new, replace_file
from jaxdist.observe.sinks.image import Image

_PICTURES = ".report"  # the end of the name of the file that holds the charts


class TensorBoard:
    """A sink that writes one file a session. Every record reaches the operating system at once: TensorBoard shows a run
    that goes on, and a killed run keeps its steps.

    A resumed session begins with an event "restarted at step N", which is how TensorBoard drops later steps of earlier
    files. What cannot be written, as on a full disk, is written before the next record.

    The charts of the report are in a file of their own, and the next end of the run puts another one in its place.
    """

    def open(self, run_dir: Path, config: str, step: int) -> None:
        """As `Sink.open`."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.text.summary import text_pb

        self._folder, now = run_dir / "tensorboard", time.time_ns()
        self._folder.mkdir(exist_ok=True)
        self._file = os.fdopen(open_new(self._folder / _name(now)), "wb", buffering=0)
        self._unwritten = b""
        self._event = Event
        self._add(Event(wall_time=now / 1e9, file_version="brain.Event:2"))
        restarted = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=now / 1e9, step=step + 1 if step else 0, session_log=restarted))
        if config:
            block = "\n".join("    " + line for line in config.splitlines())
            self._add(Event(wall_time=now / 1e9, step=step, summary=text_pb("configuration", block)))

    def record(self, record: Mapping[str, float]) -> None:
        """As `Sink.record`. The time of the line is that of its points."""
        event = self._event(wall_time=record.get("time", time.time()), step=record["step"])
        for name, value in record.items():
            if name not in ("step", "time"):
                event.summary.value.add(tag=name, simple_value=value)
        self._add(event)

    def pictures(self, step: int, images: Mapping[str, Image]) -> None:
        """As `Sink.pictures`."""
        for earlier in self._folder.glob(f"*{_PICTURES}"):
            earlier.unlink()
        now = time.time_ns()
        events = [self._event(wall_time=now / 1e9, file_version="brain.Event:2")]
        for name, image in images.items():
            event = self._event(wall_time=now / 1e9, step=step)
            value = event.summary.value.add(tag=f"report/{name}")
            value.metadata.summary_description = image.text
            value.image.encoded_image_string = image.png
            value.image.colorspace = 4  # red, green, blue and alpha
            value.image.width, value.image.height = struct.unpack(">II", image.png[16:24])
            events.append(event)
        replace_file(self._folder / (_name(now) + _PICTURES), b"".join(map(_framed, events)))

    def close(self, *, failed: bool) -> None:
        """As `Sink.close`."""
        with self._file:
            self._flush()

    def _add(self, event: Any) -> None:
        self._unwritten += _framed(event)
        self._flush()

    def _flush(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def _name(now: int) -> str:
    """The name of a file. Files are read in the order of names: the time has a fixed number of digits."""
    return f"events.out.tfevents.{now // 10**9}.{now % 10**9:09}.{os.uname().nodename}.{os.getpid()}"


def _framed(event: Any) -> bytes:
    """An event as it stands in a file: with its length and its checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = io.BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()
