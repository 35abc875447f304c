"""Atomic writes of files, such as checkpoints."""

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file; a reader never sees a part of it, and a failure leaves the old file as it was.

    Args:
        path: path of the file; its folder is made if there is none.
        content: all of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:  # a full disk does not say of which file
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def load_checkpoint(path: str | Path, map_location: Any = "cpu", *_: Any, **__: Any) -> Any:
    """Load a checkpoint: tensors and plain values, never code, whatever further arguments say.

    The checksums of the archive are compared first: a flipped bit does not become a weight.

    Raises:
        ValueError: the file is damaged, or not a checkpoint; the message is one line.
    """
    content = io.BytesIO(Path(path).read_bytes())  # an OSError of the disk is raised here
    try:
        with zipfile.ZipFile(content) as archive:
            if name := archive.testzip():
                raise zipfile.BadZipFile(f"the checksum of {name} is wrong")
        content.seek(0)
        return dict(torch.load(content, map_location=map_location, weights_only=True))
    except Exception as error:
        reason = f"is damaged, or not a checkpoint at all: {error}"
        if isinstance(error, pickle.UnpicklingError):
            reason = "is refused: it holds more than tensors and plain values"
        elif Path(path).suffix == ".zip" and zipfile.is_zipfile(path):
            reason = "is a file of Stable-Baselines3, for HeadPPO.load: take the .ckpt beside it"
        raise ValueError(f"checkpoint {path} {reason}") from error


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames; reads tensors and plain values, never code.

    Lightning's own writer goes through the system's temporary folder, and moving a file from
    there to another disk is a copy that a kill can cut short.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; if that fails, the old file is untouched."""
        content = io.BytesIO()
        torch.save(checkpoint, content)
        content.seek(0)
        if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(content):
            raise ValueError(
                f"checkpoint {path} could not be read back: it holds {', '.join(sorted(unsafe))}; "
                "keep numbers, strings, lists, dictionaries and tensors in hyperparameters and in "
                "the state of callbacks, or leave a hyperparameter out with "
                "save_hyperparameters(ignore=...)"
            )
        write_whole(Path(path), content.getbuffer())

    load_checkpoint = staticmethod(load_checkpoint)
