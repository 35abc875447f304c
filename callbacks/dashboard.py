"""What TensorBoard shows beside the values of a run: explanations, charts in groups, hparams."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import record_writer
from torch import Tensor
from torch.utils.tensorboard.summary import hparams as hparam_summaries
from torch.utils.tensorboard.writer import FileWriter, SummaryWriter

from catnat.callbacks.event_file import EventFile, scalar_events
from catnat.callbacks.tags import Kind, charts, explanation, guide
from catnat.ops import checksums

# Tags that a run writes once; a run that continues writes them again.
WRITTEN_ONCE = ("_hparams_/", "custom_scalars__config__", "guide/")

_COMPARED = (
    "head", "num_latents", "num_categories", "learning_rate", "seed", "steps",
    "source", "estimator", "env",
)  # fmt: skip


def use_fast_checksums() -> bool:
    """Let TensorBoard's writers of this process use the C kernel; False where there is none."""
    if checksums.has_kernel():
        record_writer.masked_crc32c = checksums.masked_crc32c
    return checksums.has_kernel()


class RunWriter(SummaryWriter):
    """A writer of event files in which the first value of each tag says what the tag means."""

    file_writer: Any
    all_writers: Any

    def _get_file_writer(self) -> FileWriter:
        if self.all_writers is None or self.file_writer is None:
            self.file_writer = _ExplainingWriter(
                self.log_dir, self.max_queue, self.flush_secs, self.filename_suffix
            )
            self.all_writers = {self.file_writer.get_logdir(): self.file_writer}
        writer: FileWriter = self.file_writer
        return writer


class _ExplainingWriter(FileWriter):
    event_writer: Any

    def __init__(self, log_dir: str, max_queue: int, flush_secs: int, suffix: str) -> None:
        use_fast_checksums()
        self._seen: set[str] = set()
        if "://" in str(log_dir):  # not a folder of this machine
            super().__init__(log_dir, max_queue, flush_secs, suffix)
        else:
            self.event_writer = EventFile(str(log_dir), suffix)

    def knows(self, tags: Sequence[str]) -> bool:
        """Whether all these tags have been written, and so explained."""
        return self._seen.issuperset(tags)

    def add_summary(
        self, summary: Any, global_step: int | None = None, walltime: float | None = None
    ) -> None:
        for value in summary.value:
            if value.tag not in self._seen:
                self._seen.add(value.tag)
                if said := explanation(value.tag):
                    value.metadata.summary_description = said
                    plugin = "images" if value.HasField("image") else "scalars"
                    value.metadata.plugin_data.plugin_name = plugin
        super().add_summary(summary, global_step, walltime)


def write_scalars(
    writer: FileWriter, tags: Sequence[str], steps: Sequence[int], values: Tensor
) -> None:
    """Write values (T, n) of n tags at T steps, an event for each step."""
    use_fast_checksums()
    if isinstance(writer, _ExplainingWriter) and not writer.knows(tags):
        first = zip(tags, values[0].tolist(), strict=True)
        summary = Summary(value=[Summary.Value(tag=t, simple_value=v) for t, v in first])
        writer.add_summary(summary, steps[0])
        steps, values = steps[1:], values[1:]
    events, file = scalar_events(tags, steps, values), writer.event_writer
    if isinstance(file, EventFile):
        file.add_encoded(events)
        return
    for event in events:
        file.add_event(Event.FromString(event))


def write_image(writer: SummaryWriter, tag: str, pixels: np.ndarray, step: int) -> None:
    """Write an image (H, W, 1 or 3) of bytes, in a third of the time of ``add_image``."""
    height, width, channels = pixels.shape
    image = Image.fromarray(pixels if channels == 3 else pixels[..., 0])
    encoded = io.BytesIO()
    image.save(encoded, "PNG", compress_level=1)  # level 6 takes twice as long, and saves 10 %
    content = Summary.Image(
        height=height, width=width, colorspace=channels, encoded_image_string=encoded.getvalue()
    )
    summary = Summary(value=[Summary.Value(tag=tag, image=content)])
    writer._get_file_writer().add_summary(summary, step)


def kind_of(model: LightningModule) -> Kind:
    """Which charts suit a model."""
    # hasattr would compute theta, which may not be possible before the first batch.
    if isinstance(getattr(type(model), "theta", None), property):
        return "graph"
    return "vae" if hasattr(model, "sample_prior") else "other"


def write_layout(writer: SummaryWriter, kind: Kind) -> None:
    """Write the charts of the CUSTOM SCALARS tab, and the page that explains the tags."""
    layout = {
        group: {title: ["Multiline", tags] for title, tags in each.items()}
        for group, each in charts(kind).items()
    }
    writer.add_custom_scalars(layout)
    writer.add_text("guide", guide(kind), 0)


def write_hparams(writer: SummaryWriter, hparams: dict[str, Any], metrics: list[str]) -> None:
    """Write the row of a run in the HPARAMS tab, with the names of its metrics."""
    plain = (bool, int, float, str)
    shown = {name: v if isinstance(v, plain) else str(v) for name, v in hparams.items()}
    experiment, *others = hparam_summaries(shown, dict.fromkeys(metrics, 0.0))
    _put_first(experiment)
    for summary in (experiment, *others):
        writer._get_file_writer().add_summary(summary)


def _put_first(experiment: Any) -> None:
    """Mark the columns by which runs are compared: TensorBoard shows marked ones first."""
    content = experiment.value[0].metadata.plugin_data
    parsed = HParamsPluginData.FromString(content.content)
    for info in parsed.experiment.hparam_infos:
        info.differs = info.name in _COMPARED
    content.content = parsed.SerializeToString()
