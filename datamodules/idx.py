"""Image files in the IDX format of MNIST, plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_IMAGES_MAGIC = 0x00000803  # unsigned bytes, three dimensions


def find_idx(folders: Sequence[Path], name: str) -> Path | None:
    """The file ``name`` or ``name.gz`` in the first folder that has one; None if none has."""
    for folder in folders:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    return None


def read_idx_images(path: Path) -> Tensor:
    """The images of a file as (n, 28, 28) uint8.

    Raises:
        ValueError: the file is damaged, or of another format; one line that names it.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is corrupt or truncated: {error}") from error
    if len(content) < 16:
        raise ValueError(f"{path} is truncated: {len(content)} bytes, less than an IDX header")
    magic, count, height, width = (int(each) for each in np.frombuffer(content, ">u4", 4))
    if magic != _IMAGES_MAGIC:
        raise ValueError(f"{path} is no IDX image file: it begins with 0x{magic:08x}")
    if (height, width) != (28, 28) or not count:
        raise ValueError(f"{path} should hold images of 28 x 28, has {count} of {height} x {width}")
    if len(content) != 16 + count * height * width:
        raise ValueError(
            f"{path} is corrupt or truncated: {len(content)} bytes where its header says "
            f"{16 + count * height * width}"
        )
    pixels = np.frombuffer(content, np.uint8, offset=16).reshape(count, height, width)
    return torch.from_numpy(pixels.copy())
