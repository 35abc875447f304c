"""GraphDataModule: pairs (x, y) from a list of torch-geometric's Data."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from catnat.datamodules.loader import SPLIT, InMemoryDataModule, seeded
from catnat.graphs import as_pair

Graphs = str | Path | Sequence[Any]


class GraphDataModule(InMemoryDataModule):
    """Pairs (x, y) from torch-geometric's ``Data``, all of them over the same N nodes.

    Each ``Data`` is one observation: x (N, in_features) and y (N, out_features), with a row for
    each node. Its ``edge_index`` is not used: the graph is what
    :class:`~catnat.lit_modules.GraphStructureLearner` learns. A batch is x (B, N, in_features) and
    y (B, N, out_features); all data stay on the training device.

    Args:
        train: list of ``Data``, or a file with one, saved by ``torch.save``.
        val: validation data; by default a random tenth of ``train``.
        test: as ``val``.
        batch_size: batch size of each device (B).
        seed: seed of the split and of the order of the batches.

    Example:
        >>> from torch_geometric.data import Data
        >>> graphs = [Data(x=torch.randn(6, 3), y=torch.randn(6, 2)) for _ in range(100)]
        >>> data = GraphDataModule(graphs)
        >>> data.num_nodes, data.in_features, data.out_features
        (6, 3, 2)
    """

    # Options of the model that follow from a file on the command line.
    derived_options = {
        "num_nodes": ("train", lambda train: _stacked(train, "train")[0].shape[1]),
        "in_features": ("train", lambda train: _stacked(train, "train")[0].shape[2]),
        "out_features": ("train", lambda train: _stacked(train, "train")[1].shape[2]),
    }

    def __init__(
        self,
        train: Graphs,
        val: Graphs | None = None,
        test: Graphs | None = None,
        batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, seed)
        self.train_x, self.train_y = _stacked(train, "train")
        self._given = {
            name: _stacked(graphs, name, (self.train_x, self.train_y))
            for name, graphs in (("val", val), ("test", test))
            if graphs is not None
        }
        _, self.num_nodes, self.in_features = self.train_x.shape
        self.out_features = self.train_y.shape[2]

    def make_parts(self) -> Iterable[tuple[Tensor, ...]]:
        """Split off the parts that were not given."""
        count = len(self.train_x)
        split_off = [part for part in ("val", "test") if part not in self._given]
        tenth = count // 10
        if split_off and not tenth:
            raise ValueError(f"train must have at least 10 graphs to split off {split_off[0]}")
        order = torch.arange(count)
        if split_off:
            order = torch.randperm(count, generator=seeded(SPLIT, self.seed))
        parts = {}
        for part in split_off:
            rows, order = order[-tenth:], order[:-tenth]
            parts[part] = self.train_x[rows], self.train_y[rows]
        parts |= self._given | {"train": (self.train_x[order], self.train_y[order])}
        return [parts[name] for name in ("train", "val", "test")]


def _stacked(
    graphs: Graphs, name: str, like: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """x (n, N, D) and y (n, N, E) of a list of Data, or of a file."""
    graphs = _loaded(graphs, name) if isinstance(graphs, str | Path) else graphs
    # A Data has a length, too: that of its attributes.
    if isinstance(graphs, str) or len(graphs) == 0 or hasattr(graphs, "edge_index"):
        raise ValueError(f"{name} must be a list of Data with at least one graph, got {graphs!r}")
    num_nodes = getattr(graphs[0], "num_nodes", 0) if like is None else like[0].shape[1]
    pairs = []
    for i, graph in enumerate(graphs):
        try:
            pairs.append(as_pair(graph, num_nodes))
        except ValueError as error:
            raise ValueError(f"{name}[{i}]: {error}") from None
    for i, pair in enumerate(pairs):
        for axis, values, wanted in zip("xy", pair, like or pairs[0], strict=True):
            if values.shape[1:] != wanted.shape[1:]:
                shapes = f"{tuple(values.shape[1:])}, not {tuple(wanted.shape[1:])} as the first"
                raise ValueError(f"{name}[{i}]: {axis} has the shape {shapes}")
    x, y = (torch.cat(values) for values in zip(*pairs, strict=True))
    return x, y


def _loaded(path: str | Path, name: str) -> Sequence[Any]:
    """The Data in a file, which is read without running code from it."""
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    safe = [DataEdgeAttr, DataTensorAttr, GlobalStorage]
    try:
        with torch.serialization.safe_globals(safe):
            graphs: Sequence[Any] = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{name} {str(path)!r} cannot be read: {error.strerror}") from None
    except Exception as error:  # torch.load raises many kinds for a file of another format
        reason = str(error).splitlines()[0]
        raise ValueError(f"{name} {str(path)!r} is not a list of Data: {reason}") from None
    return graphs
