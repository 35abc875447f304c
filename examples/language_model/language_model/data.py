"""Any text as sequences of tokens: words, or byte pairs."""

import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

WORD = re.compile(r"\w+|[^\w\s]")
PIECE = 20_000  # characters: longer documents are cut, so that each split has parts of them
SHARES = {"train": 0.9, "val": 0.05, "test": 0.05}


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
        batch_size: B.
        seed: of the split.
    """

    def __init__(
        self,
        path: str | None = None,
        tokens: Literal["words", "bpe"] = "words",
        vocabulary: int = 32768,
        length: int = 64,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stream: dict[str, Tensor] = {}  # all tokens of a split
        self.words_per_token: dict[str, float] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read the text, make the vocabulary, and turn text into tokens."""
        if self.stream:
            return
        pieces = list(self._pieces())
        random.Random(self.hparams.seed).shuffle(pieces)
        ends = [round(len(pieces) * share) for share in (0.9, 0.95)]
        parts = [pieces[: ends[0]], pieces[ends[0] : ends[1]], pieces[ends[1] :]]
        split = dict(zip(SHARES, parts, strict=True))
        if not all(split.values()):
            raise ValueError(f"{self.hparams.path} has too little text to split")
        encode = self._bpe(split["train"]) if self.hparams.tokens == "bpe" else word_list
        counts = Counter(token for piece in split["train"] for token in encode(piece))
        known = [token for token, _ in counts.most_common(self.hparams.vocabulary - 1)]
        number = {token: place for place, token in enumerate(known)}
        unknown = len(known)
        for name, texts in split.items():
            ids = [number.get(token, unknown) for piece in texts for token in encode(piece)]
            self.stream[name] = torch.tensor(ids)
            if len(ids) <= self.hparams.length:
                raise ValueError(f"{self.hparams.path} has too little text: {len(ids)} in {name}")
            words = len(ids)
            if self.hparams.tokens == "bpe":
                words = sum(len(WORD.findall(piece)) for piece in texts)
            self.words_per_token[name] = words / len(ids)

    def _pieces(self) -> Iterator[str]:
        for document in self._documents():
            yield from (document[n : n + PIECE] for n in range(0, len(document), PIECE))

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
            except UnicodeDecodeError:
                continue

    def _bpe(self, texts: Iterable[str]) -> Any:
        """A function from text to byte pairs, learned from these texts."""
        from tokenizers import ByteLevelBPETokenizer

        tokenizer = ByteLevelBPETokenizer()
        size = self.hparams.vocabulary - 1
        tokenizer.train_from_iterator(texts, vocab_size=size, show_progress=False)
        return lambda text: tokenizer.encode(text).ids

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Shuffled sequences."""
        return self._loader("train", shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Sequences to select by."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Sequences to report."""
        return self._loader("test")

    def _loader(self, split: str, **options: Any) -> DataLoader[Tensor]:
        sequences = self.stream[split].unfold(0, self.hparams.length + 1, self.hparams.length)
        return DataLoader(sequences, self.hparams.batch_size, **options)  # type: ignore[arg-type]


def word_list(text: str) -> list[str]:
    """Words and signs of punctuation."""
    return WORD.findall(text)
