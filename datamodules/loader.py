"""Data in memory: a loader without workers that resumes exactly, and its data modules."""

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
    """Generator seeded by several numbers >= 0, which are hashed into one seed."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    return torch.Generator(device).manual_seed(seed)


class InMemoryLoader:
    """Iterates over batches of B items, the same rows of every tensor.

    The order of epoch e is a function of (seed, e). ``state_dict`` contains the position in the
    current epoch; after ``load_state_dict`` the next pass continues there. With several ranks, a
    batch of ``batch_size * world_size`` items is divided among the ranks: together they see the
    items that one process with that batch size would see.

    Without ``shuffle`` (evaluation) the order is that of the items, every pass is equal, and the
    last batch may be smaller. With ``shuffle``, an epoch omits the items beyond the last full
    batch.

    Args:
        items: tensors of equal length n, on the device of the batches.
        batch_size: batch size of each rank (B).
        shuffle: whether every epoch has a new order.
        seed: seed of the order.
        rank: rank of this loader, which returns its share of each batch.
        world_size: number of ranks.
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
        self.stride = batch_size * world_size  # items per batch on all ranks together
        if shuffle and self.stride > self.size:
            raise ValueError(
                f"batch_size {batch_size} on {world_size} device(s) is larger than the "
                f"{self.size} training items"
            )
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        # Lightning may end each epoch after this many batches; the next epoch continues there.
        self.max_batches = len(self)
        self.epoch = 0
        self._position = 0  # batches of this epoch that were returned
        self._resumed = False

    def gather(self, index: Tensor, batch: int) -> Any:
        """Items at these indices, (B,), as the batch of this number in the epoch."""
        return tuple(values[index] for values in self.items)

    def state_dict(self) -> dict[str, int]:
        """Numbers of the epoch and of the returned batches; equal on all ranks."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue the next pass at the saved position."""
        self.epoch = state["epoch"]
        self._position = state["position"]
        self._resumed = True

    def __len__(self) -> int:
        return self.size // self.stride if self.shuffle else -(-self.size // self.stride)

    def __iter__(self) -> Iterator[Any]:
        # Lightning may create an iterator without using it, or load a state in between. A generator
        # reads the state at the first draw. Epochs are counted here, because Lightning's count is
        # one too high after resuming from the end of an epoch.
        continues = self._resumed and self._position < min(len(self), self.max_batches)
        if self._position and not continues:
            self.epoch += self.shuffle
            self._position = 0
        self._resumed = False
        order = torch.arange(self.size)
        if self.shuffle:
            order = torch.randperm(self.size, generator=seeded(_ORDER, self.seed, self.epoch))
        batches = order.to(self.items[0].device).split(self.stride)
        # items of each batch on this rank
        self._shares = [batch[self.rank :: self.world_size] for batch in batches]
        while self._position < len(self):
            yield from self.next_batches(1)

    def next_batches(self, most: int) -> list[Any]:
        """The next batches of the current pass, which continues after them.

        Models that take several steps at once use it.

        Args:
            most: largest number of batches; fewer are returned at the end of an epoch.
        """
        first = self._position
        self._position = min(first + most, len(self))
        return [self.gather(self._shares[i], i) for i in range(first, self._position)]


class InMemoryDataModule(LightningDataModule):
    """Data in three parts, "train", "val" and "test", each with an :class:`InMemoryLoader`.

    Subclasses implement :meth:`make_parts`.

    Args:
        batch_size: batch size of each device (B).
        seed: seed of the split, the order and all other randomness of the data.
    """

    source = ""  # origin of the data: a run does not resume with data from another origin

    def __init__(self, batch_size: int, seed: int) -> None:
        super().__init__()
        require_positive(batch_size=batch_size)
        require_at_least(0, seed=seed)
        self.batch_size = batch_size
        self.seed = seed
        self.parts: dict[str, tuple[Tensor, ...]] = {}

    def make_loader(self, part: str, device: torch.device, **options: Any) -> InMemoryLoader:
        """Loader of one part, with batches on a device."""
        items = tuple(values.to(device) for values in self.parts[part])
        return InMemoryLoader(items, self.batch_size, **options)

    def make_parts(self) -> Iterable[tuple[Tensor, ...]]:
        """Make the three parts, each a tuple of tensors of equal length; called once."""
        return ()

    def setup(self, stage: str | None = None) -> None:
        """Make the parts and discard the loader of an earlier run."""
        self._train_loader: InMemoryLoader | None = None
        self._train_state: State = {}
        if not self.parts:
            self.parts = dict(zip(("train", "val", "test"), self.make_parts(), strict=False))

    def train_dataloader(self) -> InMemoryLoader:
        """Batches in a new order every epoch."""
        if (
            self._train_loader is None
        ):  # one loader counts the epochs, also if Lightning calls this again
            # Overfitting uses the same few batches in each epoch.
            loader = self._loader("train", shuffle=not getattr(self.trainer, "overfit_batches", 0))
            limit = getattr(self.trainer, "limit_train_batches", 1.0)
            loader.max_batches = limit if isinstance(limit, int) else int(limit * len(loader))
            if self._train_state:
                source = self._train_state.get("source", self.source)
                if source != self.source:
                    raise ValueError(
                        f"the checkpoint was trained on data from {source}, "
                        f"but the data are now from {self.source}"
                    )
                loader.load_state_dict(self._train_state)
            self._train_loader = loader
        return self._train_loader

    def val_dataloader(self) -> InMemoryLoader:
        """Validation part, always in the same order."""
        return self._loader("val")

    def test_dataloader(self) -> InMemoryLoader:
        """Test part, always in the same order."""
        return self._loader("test")

    predict_dataloader = test_dataloader

    def state_dict(self) -> State:
        """State of the training loader, which Lightning saves only within an epoch."""
        if self._train_loader is None:
            return {}
        return self._train_loader.state_dict() | {"source": self.source}

    def load_state_dict(self, state_dict: State) -> None:
        """Continue the training loader from this state."""
        self._train_state = state_dict

    def _loader(self, part: str, **options: Any) -> InMemoryLoader:
        device = torch.device("cpu")
        if self.trainer is not None:
            device = self.trainer.strategy.root_device
            options |= {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        return self.make_loader(part, device, seed=self.seed, **options)
