"""Any text as sequences of tokens: words, or byte pairs."""

import hashlib
import os
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from catnat.output_layer.orders import by_cooccurrence

WORD = re.compile(r"\w+|[^\w\s]")
PIECE = 20_000  # characters: longer documents are cut, so that each split has parts of them
SHARES = {"train": 0.9, "val": 0.05, "test": 0.05}


class Windows(Dataset[Tensor]):
    """Batches (B, T + 1) of B long rows: each row of a batch goes on where the last batch ended.

    The last token of a batch is the first of the next one. What does not fill B rows is left out.
    """

    def __init__(self, stream: Tensor, rows: int, length: int) -> None:
        self.rows, self.length = stream[: len(stream) // rows * rows].view(rows, -1), length

    def __len__(self) -> int:
        return (self.rows.shape[1] - 1) // self.length

    def __getitem__(self, place: int) -> Tensor:
        return self.rows[:, place * self.length : (place + 1) * self.length + 1].long()


class TextData(LightningDataModule):
    """Batches (B, T + 1) of tokens from text, 90 % to train on, 5 % to select by, 5 % to test.

    The default text is there on every machine: the Python files of the standard library, with
    their comments and docstrings (Python 3.11: 1,790 files, 31.5 million characters, 7.1 million
    words of 120 thousand kinds; every sign of punctuation is a word).

    Token 0 is the most frequent one in the training text, and so on.

    Args:
        path: a text file, or a folder whose files are read, those that are no text left out; or
            a file that :meth:`save` wrote, which has the tokens already.
        tokens: "words", or "bpe" for byte pairs, which needs the library ``tokenizers``.
        vocabulary: K. The K - 1 most frequent words are tokens, all others are one token together.
        length: T, tokens in a sequence.
        batch_size: B. Each of the B sequences of a batch continues one of the batch before.
        seed: of the split.
        cache: a folder that keeps tokens and the order of words for the next run with this text.
    """

    def __init__(
        self,
        path: str | None = None,
        tokens: Literal["words", "bpe"] = "words",
        vocabulary: int = 32768,
        length: int = 64,
        batch_size: int = 32,
        seed: int = 0,
        cache: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stream: dict[str, Tensor] = {}  # all tokens of a split
        self.words_per_token: dict[str, float] = {}
        self._key = ""  # of the text and the options that decide its tokens

    def setup(self, stage: str | None = None) -> None:
        """Read the text, make the vocabulary, and turn text into tokens."""
        if self.stream:
            return
        if str(self.hparams.path).endswith(".npz"):
            self._load(Path(self.hparams.path))
        else:
            documents = list(self._documents())
            options = (self.hparams.tokens, self.hparams.vocabulary, self.hparams.seed)
            described = "\0".join(map(str, (*options, *documents)))
            self._key = hashlib.sha256(described.encode()).hexdigest()[:16]
            tokenized = self._cached("tokens", lambda: self._tokenized(documents))
            self.stream = tokenized["stream"]
            self.words_per_token = tokenized["words_per_token"]
        for name, stream in self.stream.items():
            if len(stream) <= self.hparams.length * self.hparams.batch_size:
                few = f"{len(stream)} tokens in {name}, less than a batch"
                raise ValueError(f"{self.hparams.path} has too little text: {few}")

    def counts(self) -> Tensor:
        """How often each token occurs in the training text, (K,)."""
        return torch.bincount(self.stream["train"], minlength=self.hparams.vocabulary)

    def order(self, frequent: int = 0) -> Tensor:
        """The order of the tokens by what comes before them, see ``catnat.output_layer.orders``."""
        stream, K = self.stream["train"], self.hparams.vocabulary

        def make() -> dict[str, Any]:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            return {"order": by_cooccurrence(stream.to(device), K, frequent).cpu()}

        order: Tensor = self._cached(f"order{frequent}", make)["order"]
        return order

    def save(self, path: str | Path) -> None:
        """Write the tokens to a small file, which can be the ``path`` of another run."""
        arrays = {name: stream.numpy() for name, stream in self.stream.items()}
        if self.hparams.vocabulary <= 2**16:
            arrays = {name: stream.astype(np.uint16) for name, stream in arrays.items()}
        shares = np.array([self.words_per_token[name] for name in SHARES])
        np.savez_compressed(path, words_per_token=shares, **arrays)

    def _load(self, path: Path) -> None:
        """Read what :meth:`save` wrote."""
        with np.load(path) as arrays:
            for name, share in zip(SHARES, arrays["words_per_token"], strict=True):
                self.stream[name] = torch.from_numpy(arrays[name].astype(np.int32))
                self.words_per_token[name] = float(share)
        largest = max(int(stream.max()) for stream in self.stream.values())
        if largest >= self.hparams.vocabulary:
            raise ValueError(f"{path} has token {largest}: a vocabulary of {largest + 1} or more")
        self._key = f"{path.stem}-{self.hparams.vocabulary}"

    def _cached(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the cache has under this name; made and put there if the cache has none."""
        if self.hparams.cache is None:
            return make()
        path = Path(self.hparams.cache, f"{name}-{self._key}.pt")
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            torch.save(make(), partial)
            os.replace(partial, path)
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
        return loaded

    def _tokenized(self, documents: Iterable[str]) -> dict[str, Any]:
        pieces = [d[n : n + PIECE] for d in documents for n in range(0, len(d), PIECE)]
        random.Random(self.hparams.seed).shuffle(pieces)
        ends = [round(len(pieces) * share) for share in (0.9, 0.95)]
        parts = [pieces[: ends[0]], pieces[ends[0] : ends[1]], pieces[ends[1] :]]
        split = dict(zip(SHARES, parts, strict=True))
        if not all(split.values()):
            raise ValueError(f"{self.hparams.path} has too little text to split")
        encode = self._bpe(split["train"]) if self.hparams.tokens == "bpe" else WORD.findall
        listed = {
            name: [t for piece in texts for t in encode(piece)] for name, texts in split.items()
        }
        known = [t for t, _ in Counter(listed["train"]).most_common(self.hparams.vocabulary - 1)]
        number = {token: place for place, token in enumerate(known)}
        stream, words_per_token = {}, {}
        for name, tokens in listed.items():
            stream[name] = torch.tensor([number.get(t, len(known)) for t in tokens]).int()
            words = len(tokens)
            if self.hparams.tokens == "bpe":
                words = sum(len(WORD.findall(piece)) for piece in split[name])
            words_per_token[name] = words / max(1, len(tokens))
        # The token of all other words is a frequent one: it gets the number that it deserves.
        counts = torch.bincount(stream["train"], minlength=self.hparams.vocabulary)
        rank = counts.argsort(descending=True, stable=True).argsort().int()
        stream = {name: rank[tokens] for name, tokens in stream.items()}
        return {"stream": stream, "words_per_token": words_per_token}

    def _documents(self) -> Iterator[str]:
        if self.hparams.path is None:
            files = Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")
            found = sorted(file for file in files if "site-packages" not in file.parts)
        else:
            path = Path(self.hparams.path)
            if not path.exists():
                raise FileNotFoundError(f"--data.path {path}: there is no such file or folder")
            found = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
        for file in found:
            try:
                yield file.read_text()
            except UnicodeDecodeError as error:
                if len(found) == 1:
                    raise ValueError(f"--data.path {file} is no text in UTF-8: {error}") from error

    def _bpe(self, texts: Iterable[str]) -> Callable[[str], list[int]]:
        """A function from text to byte pairs, learned from these texts."""
        from tokenizers import ByteLevelBPETokenizer

        tokenizer = ByteLevelBPETokenizer()
        size = self.hparams.vocabulary - 1
        tokenizer.train_from_iterator(texts, vocab_size=size, show_progress=False)
        return lambda text: tokenizer.encode(text).ids

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Sequences to train on."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Sequences to select by."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Sequences to report."""
        return self._loader("test")

    def _loader(self, split: str) -> DataLoader[Tensor]:
        stream = self.stream[split]
        if self.trainer is not None:  # all tokens go to the device at once, and no batch waits
            stream = stream.to(self.trainer.strategy.root_device)
        return DataLoader(Windows(stream, self.hparams.batch_size, self.hparams.length), None)
