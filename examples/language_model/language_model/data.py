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

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from catnat.orders import by_embedding

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
        path: a text file, or a folder whose files are read, those that are no text left out.
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
        documents = list(self._documents())
        given = (self.hparams.tokens, self.hparams.vocabulary, self.hparams.seed, *documents)
        self._key = hashlib.sha256("\0".join(map(str, given)).encode()).hexdigest()[:16]
        kept = self._kept("tokens", lambda: self._tokenized(documents))
        self.stream, self.words_per_token = kept["stream"], kept["words_per_token"]
        for name, stream in self.stream.items():
            if len(stream) <= self.hparams.length * self.hparams.batch_size:
                few = f"{len(stream)} tokens in {name}, less than a batch"
                raise ValueError(f"{self.hparams.path} has too little text: {few}")

    def counts(self) -> Tensor:
        """How often each token occurs in the training text, (K,)."""
        return torch.bincount(self.stream["train"], minlength=self.hparams.vocabulary)

    def order(self) -> Tensor:
        """The order of the tokens by what comes before them, see ``catnat.orders``."""
        stream, K = self.stream["train"], self.hparams.vocabulary
        return self._kept("order", lambda: {"order": by_embedding(vectors_of(stream, K))})["order"]

    def _kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the cache has under this name; made and put there if the cache has none."""
        if self.hparams.cache is None:
            return make()
        path = Path(self.hparams.cache, f"{name}-{self._key}.pt")
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            torch.save(make(), partial)
            os.replace(partial, path)
        found: dict[str, Any] = torch.load(path, weights_only=True)
        return found

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


def vectors_of(tokens: Tensor, vocabulary: int, dims: int = 64, seed: int = 0) -> Tensor:
    """Vectors (K, dims) that are near for words which follow the same words.

    They are the leading left singular vectors, times the roots of the singular values, of the
    matrix of positive pointwise mutual information, log(P(a, b) / (P(a) P(b))) where it is
    positive, between a word b and the word a before it; by random projection with power iterations
    (Halko et al., 2011).
    """
    K, device = vocabulary, tokens.device
    pairs, counts = (tokens[1:].long() * K + tokens[:-1]).unique(return_counts=True)
    after, before = pairs // K, pairs % K
    of_after = torch.zeros(K, device=device).index_add_(0, after, counts.float())
    of_before = torch.zeros(K, device=device).index_add_(0, before, counts.float())
    information = torch.log(counts * counts.sum() / (of_after[after] * of_before[before]))
    given = (torch.stack((after, before)), information.clamp_min(0), (K, K))
    there = torch.sparse_coo_tensor(*given, check_invariants=False).coalesce()
    back = there.mT.coalesce()
    generator = torch.Generator(device).manual_seed(seed)
    basis = torch.randn(K, min(K, dims + 8), device=device, generator=generator)
    for _ in range(3):
        basis = torch.linalg.qr(back @ torch.linalg.qr(there @ basis)[0])[0]
    left, singular, _ = torch.linalg.svd(there @ basis, full_matrices=False)
    return left[:, :dims] * singular[:dims].sqrt()
