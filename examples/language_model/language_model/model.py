"""An LSTM language model, and its outputs: softmax and tree, softmax alone, adaptive softmax."""

import itertools
import time
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from catnat import CatnatHead, TreeLinear, make_head


class LinearOutput(nn.Linear):
    """A linear layer and a head: the scores of all K words for every token.

    Args:
        width: of the hidden states.
        vocabulary: K.
        head: its name.
        keep_precision: train softmax on scores as the layer gives them, where autocast would make
            them float32; tests do not.
    """

    def __init__(
        self, width: int, vocabulary: int, head: str, keep_precision: bool = False
    ) -> None:
        of_words = make_head(head, vocabulary)
        super().__init__(width, of_words.num_scores)
        self.head = of_words
        self.keep_precision = keep_precision

    def start_from_counts(self, counts: Tensor) -> None:
        """Let the biases say how frequent words are, as :class:`catnat.TreeLinear` does."""
        smoothed = counts.double() + 1  # so that no word is impossible
        self.bias.data.copy_(self.head.inverse(smoothed / smoothed.sum()))

    def nll(self, hidden: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """Negative log-likelihood."""
        scores = self(hidden)
        if self.head.name == "softmax":  # torch's own: the fastest
            if self.keep_precision and reduction == "mean":
                with torch.autocast(scores.device.type, enabled=False):
                    return F.cross_entropy(scores, target)
            return F.cross_entropy(scores, target, reduction=reduction)
        return F.nll_loss(self.head.log_probs(scores), target, reduction=reduction)

    def best(self, hidden: Tensor) -> Tensor:
        """The likeliest words."""
        return self.head.log_probs(self(hidden)).argmax(-1)


class TreeOutput(TreeLinear):
    """A softmax over the frequent words and a tree over the others."""

    def best(self, hidden: Tensor) -> Tensor:
        """The likeliest words."""
        return self.topk(hidden, 1).indices[..., 0]


class AdaptiveOutput(nn.AdaptiveLogSoftmaxWithLoss):
    """Torch's adaptive softmax: few scores for frequent words, more for others."""

    def __init__(
        self, width: int, vocabulary: int, cutoffs: list[int], div_value: float = 4.0
    ) -> None:
        super().__init__(width, vocabulary, cutoffs, div_value, head_bias=True)

    def start_from_counts(self, counts: Tensor) -> None:
        """Let the biases say how frequent the first words and the groups of others are."""
        groups = [counts[a:b].sum()[None] for a, b in itertools.pairwise(self.cutoffs)]
        smoothed = torch.cat((counts[: self.cutoffs[0]], *groups)) + 1.0
        self.head.bias.data.copy_((smoothed / smoothed.sum()).log())

    def nll(self, hidden: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """Negative log-likelihood: what torch's class computes, which fails under autocast."""
        column, losses = target, []
        for group, (first, last) in enumerate(itertools.pairwise(self.cutoffs)):
            inside = ((target >= first) & (target < last)).nonzero()[:, 0]
            column = column.index_fill(0, inside, self.shortlist_size + group)
            scores = self.tail[group](hidden[inside])
            below = F.cross_entropy(scores, target[inside] - first, reduction="none")
            zeros = torch.zeros(len(target), device=target.device)
            losses.append(zeros.index_add(0, inside, below.float()))
        total = F.cross_entropy(self.head(hidden), column, reduction="none") + sum(losses)
        return total.mean() if reduction == "mean" else total

    def best(self, hidden: Tensor) -> Tensor:
        """The likeliest words."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.log_prob(hidden.float()).argmax(-1)


class LanguageModel(LightningModule):
    """Predicts each token from those before it.

    Args:
        head: a tree head (sigmoid, natural) makes the output a softmax over the frequent words and
            a tree over the others, any other head a linear layer.
        vocabulary: K, the number of tokens; follows from the data.
        frequent: how many words the softmax beside a tree has, 0 for a tree alone. None: an eighth
            of the words, at most 4,096.
        output: "adaptive" for torch's adaptive softmax instead of the head.
        cutoffs: of adaptive softmax; None for K / 16 and K / 4.
        order: which words share a subtree: those that follow the same words, or those that are
            about equally frequent.
        tail: option of natural, below which probability a split has logarithmic tails; 0 for none.
            None: the default of :class:`catnat.TreeLinear`, 0.05 for natural. Without tails,
            words become impossible.
        width: of embedding and LSTM.
        layers: of the LSTM.
        dropout: before and between layers.
        learning_rate: its peak.
        warmup: steps to the peak; the rate then falls linearly to 0.
        fisher_every_n_steps: how often a tree's Fisher diagonal is shown to the monitor.
        fisher_rows: of how many tokens.
        accuracy_rows: tokens of each batch for which the likeliest word is looked for.
    """

    options_of_data = ("vocabulary",)

    def __init__(
        self,
        head: str = "sigmoid",
        vocabulary: int = 32768,
        frequent: int | None = None,
        output: Literal["head", "adaptive"] = "head",
        cutoffs: list[int] | None = None,
        order: Literal["cooccurrence", "frequency"] = "cooccurrence",
        tail: float | None = None,
        width: int = 256,
        layers: int = 1,
        dropout: float = 0.1,
        learning_rate: float = 2e-3,
        warmup: int = 100,
        fisher_every_n_steps: int = 50,
        fisher_rows: int = 16,
        accuracy_rows: int = 256,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self._memory: dict[bool, Any] = {}  # of the LSTM, in training and else
        self.output: Any
        options = {} if tail is None else {"tail": tail}
        if output == "adaptive":
            self.output = AdaptiveOutput(
                width, vocabulary, cutoffs or [vocabulary // 16, vocabulary // 4]
            )
        elif isinstance(make_head(head, 2, **options), CatnatHead):
            number = min(4096, vocabulary // 8) if frequent is None else frequent
            any_order = range(vocabulary)  # until setup knows the text
            self.output = TreeOutput(width, vocabulary, head, any_order, frequent=number, **options)
        else:
            self.output = LinearOutput(width, vocabulary, head)

    def hidden(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """Hidden states (B * T, width) of tokens (B, T), which continue those of the last batch."""
        memory = self._memory.get(self.training) if batch_idx else None
        last = memory and [state.to(self.device) for state in memory]
        hidden, memory = self.lstm(self.dropout(self.embedding(tokens)), last)
        self._memory[self.training] = [state.detach() for state in memory]
        return self.dropout(hidden).flatten(0, 1)

    def setup(self, stage: str) -> None:
        """Build the tree from the training tokens, and start from how frequent they are."""
        if stage != "fit":  # a checkpoint brings everything
            return
        data = self.trainer.datamodule
        if isinstance(self.output, TreeLinear) and self.hparams.order == "cooccurrence":
            self.output.set_order(data.order(self.output.num_frequent))
        self.output.start_from_counts(data.counts())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what the LSTM remembers of the text so far."""
        checkpoint["memory"] = self._memory.get(True)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Resume the text where it was left."""
        self._memory[True] = checkpoint["memory"]

    def on_train_start(self) -> None:
        """Start the clock."""
        self._clock, self._tokens = time.perf_counter(), 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of a batch (B, T + 1)."""
        hidden, target = self.hidden(batch[:, :-1], batch_idx), batch[:, 1:].flatten()
        loss = self.output.nll(hidden, target)
        self._tokens += target.numel()
        self._show(hidden)
        if (self.global_step + 1) % (self.trainer.log_every_n_steps or 1) == 0:
            now = time.perf_counter()
            rate = self._tokens / (now - self._clock)
            self._clock, self._tokens = now, 0
            self.log_dict({"train/loss": loss.detach(), "train/tokens_per_second": rate})
        return loss

    def _show(self, hidden: Tensor) -> None:
        """Call the head of a tree on few tokens: the Fisher monitor looks at such calls."""
        tree = isinstance(self.output, TreeLinear)
        if tree and self.global_step % self.hparams.fisher_every_n_steps == 0:
            with torch.no_grad():
                self.output.head(self.output.scores(hidden[: self.hparams.fisher_rows]))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Loss and accuracy of a batch."""
        self._evaluate(batch, batch_idx, "val")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Loss and accuracy of a batch."""
        self._evaluate(batch, batch_idx, "test")

    def _evaluate(self, batch: Tensor, batch_idx: int, split: str) -> None:
        hidden, target = self.hidden(batch[:, :-1], batch_idx), batch[:, 1:].flatten()
        rows = slice(self.hparams.accuracy_rows)
        right = (self.output.best(hidden[rows]) == target[rows]).float().mean()
        loss = self.output.nll(hidden, target)
        numbers = {f"{split}/loss": loss, f"{split}/accuracy": right}
        self.log_dict(numbers, batch_size=len(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Perplexity per word."""
        self._perplexity("val")

    def on_test_epoch_end(self) -> None:
        """Perplexity per word."""
        self._perplexity("test")

    def _perplexity(self, split: str) -> None:
        per_token = self.trainer.callback_metrics[f"{split}/loss"]
        words_per_token = self.trainer.datamodule.words_per_token[split]
        self.log(f"{split}/perplexity", torch.exp(per_token / words_per_token))

    def configure_optimizers(self) -> Any:
        """Adam, with a rate that rises and falls linearly."""
        optimizer = torch.optim.Adam(self.parameters(), self.hparams.learning_rate)
        steps, warmup = self.trainer.estimated_stepping_batches, self.hparams.warmup

        def rate(step: int) -> float:
            return min((step + 1) / max(1, warmup), max(0.0, 1 - step / steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
