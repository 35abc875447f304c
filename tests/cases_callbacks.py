"""A small model of a user's own, a logger that remembers, and a run of a few steps."""

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from catnat import make_head

TAGS = (
    "fim/exact_off_diagonal_mass",
    "fim/off_diagonal_mass",
    "fim/saturated",
    "fim_spectrum/condition_number",
    "fim/off_diagonal_mass_l1",
    "fim_sampled/off_diagonal_share",
    "fim_sampled/off_diagonal_mass_l1",
)


class Small(L.LightningModule):
    """A linear layer with two latents of six categories; keeps the scores of every step."""

    def __init__(self, head="natural", second=None, noisy=True):
        super().__init__()
        self.head = make_head(head, 6)
        self.second = make_head(second, 3) if second else None
        self.linear = nn.Linear(4, 2 * self.head.num_scores)
        self.noisy, self.lr = noisy, 0.5
        self.seen = []

    def training_step(self, batch, batch_idx):
        mine = batch[0][self.global_rank :: self.trainer.world_size]
        scores = 3 * self.linear(mine).unflatten(-1, (2, -1))
        self.seen.append(scores.detach().clone())
        q = self.head(scores)
        loss = -q.log_prob(q.sample()).mean() if self.noisy else q.entropy().mean()
        if self.second is not None:
            loss = loss + self.second(scores[:, 0, : self.second.num_scores]).entropy().mean()
        return loss

    def validation_step(self, batch, batch_idx):
        self.head(torch.zeros(1, 2, self.head.num_scores))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Memory(Logger):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.rows = {}
        self.observed = []  # steps, in the order in which they came

    name, version = "memory", 0

    def log_metrics(self, metrics, step=None):
        self.rows[step] = self.rows.get(step, {}) | metrics
        self.observed += [step] if "fim/saturated" in metrics else []

    def log_hyperparams(self, params):
        pass

    def series(self, tag):
        return {step: row[tag] for step, row in self.rows.items() if tag in row}


def loader(batch_size=8, batches=5):
    x = torch.randn(batch_size * batches, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size)


def quiet_trainer(**options):
    """A trainer on the CPU that writes nothing, unless the options say so."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**quiet | options)


def fit(model, *callbacks, logger=None, data=None, val=None, **flags):
    torch.manual_seed(3)
    flags = {"max_steps": 5} | flags
    trainer = quiet_trainer(logger=logger or Memory(), callbacks=list(callbacks), **flags)
    trainer.fit(model, data or loader(), val)
    return trainer
