"""Data held in memory: a loader without workers, exactly resumable, and data modules with it."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from catnat.checks import require_at_least, require_positive
from catnat.rng import State

# The first number of a seed is its purpose.
SPLIT = 1
_ORDER = 2
BINARIZATION = 3
GRAPH_DATA = 4


def seeded(*numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator with one seed of some numbers >= 0, well-mixed: torch uses the low 32 bits."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    return torch.Generator(device).manual_seed(seed)


class InMemoryLoader:
    """Iterates over batches of B items, the same rows of every tensor.

    The order of epoch e is a function of (seed, e). ``state_dict`` says how far the current epoch
    has come; after ``load_state_dict`` the next pass continues there. With several ranks, a batch
    of ``batch_size * world_size`` items is dealt out to the ranks: together they see the items that
    one process with that batch size would see.

    Without ``shuffle`` (evaluation) the order is that of the items, every pass is the same, and
    the last batch may be smaller. With ``shuffle``, the items beyond the last full batch are left
    out of the epoch.

    Args:
        items: tensors of equal length n, on the device where the batches are wanted.
        batch_size: B, of each rank.
        shuffle: a new order in every epoch.
        seed: of the order.
        rank: which share of each batch this loader gives out.
        world_size: number of shares.
    """

    def __init__(
        self,
        items: tuple[Tensor, ...],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.items = items
        self.size = len(items[0])
        self.stride = batch_size * world_size  # items of a batch, on all ranks together
        if shuffle and self.stride > self.size:
            raise ValueError(
                f"a batch of {batch_size} on {world_size} device(s) is more than the "
                f"{self.size} items to train on"
            )
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        # The iterating loop may end each epoch after so many batches; the next one begins there.
        self.max_batches = len(self)
        self.epoch = 0
        self._position = 0  # batches of this epoch already given out
        self._resumed = False

    def gather(self, index: Tensor, batch: int) -> Any:
        """The items with these numbers, (B,), as batch of this number in the epoch."""
        return tuple(values[index] for values in self.items)

    def state_dict(self) -> dict[str, int]:
        """The number of this epoch, and of the batches given out; the same on all ranks."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next pass continue where the state was taken."""
        self.epoch = state["epoch"]
        self._position = state["position"]
        self._resumed = True

    def __len__(self) -> int:
        return self.size // self.stride if self.shuffle else -(-self.size // self.stride)

    def __iter__(self) -> Iterator[Any]:
        # Lightning may make an iterator and never draw from it, or load a state in between. This is
        # a generator, so nothing is decided before the first draw. The epochs are counted here,
        # because Lightning's count is one too high after resuming from the end of an epoch.
        continues = self._resumed and self._position < min(len(self), self.max_batches)
        if self._position and not continues:
            self.epoch += self.shuffle
            self._position = 0
        self._resumed = False
        order = torch.arange(self.size)
        if self.shuffle:
            order = torch.randperm(self.size, generator=seeded(_ORDER, self.seed, self.epoch))
        batches = order.to(self.items[0].device).split(self.stride)
        # Of this rank: the items of each batch.
        self._shares = [batch[self.rank :: self.world_size] for batch in batches]
        while self._position < len(self):
            yield from self.next_batches(1)

    def next_batches(self, most: int) -> list[Any]:
        """The batches that the present pass would give out next; the pass continues after them.

        This is for models that take several steps at once.

        Args:
            most: how many batches; fewer are given if the epoch has fewer left.
        """
        first = self._position
        self._position = min(first + most, len(self))
        return [self.gather(self._shares[i], i) for i in range(first, self._position)]


class InMemoryDataModule(LightningDataModule):
    """Data in three parts, "train", "val" and "test", each with an :class:`InMemoryLoader`.

    A subclass has :meth:`make_parts`.

    Args:
        batch_size: B, of each device.
        seed: of the split, the order, and all other randomness of the data.
    """

    source = ""  # where the data come from: a run does not resume with data from elsewhere

    def __init__(self, batch_size: int, seed: int) -> None:
        super().__init__()
        require_positive(batch_size=batch_size)
        require_at_least(0, seed=seed)
        self.batch_size = batch_size
        self.seed = seed
        self.parts: dict[str, tuple[Tensor, ...]] = {}

    def make_loader(self, part: str, device: torch.device, **options: Any) -> InMemoryLoader:
        """A loader of one part that gives out batches on a device."""
        items = tuple(values.to(device) for values in self.parts[part])
        return InMemoryLoader(items, self.batch_size, **options)

    def make_parts(self) -> Iterable[tuple[Tensor, ...]]:
        """The three parts, tensors of equal length each; called once."""
        return ()

    def setup(self, stage: str | None = None) -> None:
        """Make the parts, and forget the loader of an earlier run."""
        self._train_loader: InMemoryLoader | None = None
        self._train_state: State = {}
        if not self.parts:
            self.parts = dict(zip(("train", "val", "test"), self.make_parts(), strict=False))

    def train_dataloader(self) -> InMemoryLoader:
        """Batches in a new order every epoch."""
        if self._train_loader is None:  # Lightning may ask again: one loader counts the epochs
            # To overfit means the same few batches each epoch.
            loader = self._loader("train", shuffle=not getattr(self.trainer, "overfit_batches", 0))
            limit = getattr(self.trainer, "limit_train_batches", 1.0)
            loader.max_batches = limit if isinstance(limit, int) else int(limit * len(loader))
            if self._train_state:
                source = self._train_state.get("source", self.source)
                if source != self.source:
                    raise ValueError(
                        f"the checkpoint's run had data from {source}, here they are from "
                        f"{self.source}"
                    )
                loader.load_state_dict(self._train_state)
            self._train_loader = loader
        return self._train_loader

    def val_dataloader(self) -> InMemoryLoader:
        """The validation part, always in the same order."""
        return self._loader("val")

    def test_dataloader(self) -> InMemoryLoader:
        """The test part, always in the same order."""
        return self._loader("test")

    predict_dataloader = test_dataloader

    def state_dict(self) -> State:
        """The state of the training loader; Lightning itself saves it only within an epoch."""
        if self._train_loader is None:
            return {}
        return self._train_loader.state_dict() | {"source": self.source}

    def load_state_dict(self, state_dict: State) -> None:
        """Make the training loader continue from this state."""
        self._train_state = state_dict

    def _loader(self, part: str, **options: Any) -> InMemoryLoader:
        device = torch.device("cpu")
        if self.trainer is not None:
            device = self.trainer.strategy.root_device
            options |= {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        return self.make_loader(part, device, seed=self.seed, **options)
