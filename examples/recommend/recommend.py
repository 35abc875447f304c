"""Recommend one of a million items: a softmax over the popular ones and a tree over the others.

Users like eight neighboring genres of 500; an item has a genre, and a popularity there by Zipf's
law. From the genres of a user's last eight items two outputs predict the next item. Both know the
genres of items and how popular these are, and have 20 s to train. One core, about a minute.
"""

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from catnat import TreeLinear

K, GENRES, WIDTH, SECONDS, RATE = 1_000_000, 500, 32, 20, 0.02
torch.manual_seed(0)
genre = torch.randint(GENRES, (K,))
shelf = genre.argsort(stable=True)  # the items of a genre side by side, popular ones first
sizes = genre.bincount(minlength=GENRES)


def draw_users(number: int) -> tuple[Tensor, Tensor]:
    """The genres of eight items of each user, and the item that follows."""
    chosen = (torch.randint(GENRES, (number, 1)) + torch.randint(8, (number, 9))) % GENRES
    rank = (sizes[chosen] ** torch.rand(number, 9)).long() - 1  # of the item in its genre
    items = shelf[(sizes.cumsum(0) - sizes)[chosen] + rank]
    return genre[items[:, :8]], items[:, 8]


class SampledSoftmax(nn.Linear):  # over the target and 1,024 items that others bought
    def nll(self, hidden: Tensor, target: Tensor) -> Tensor:
        rows = torch.cat((target, past[torch.randint(len(past), (1024,))]))
        weights = F.embedding(rows, self.weight, sparse=True) + of_genre(genre[rows])
        biases = torch.gather(self.bias, 0, rows, sparse_grad=True) - shares[rows].log()
        others = (hidden @ weights.T + biases).where(target[:, None] != rows, -1e9)
        scores = (hidden * weights[: len(target)]).sum(-1) + biases[: len(target)]
        scores = torch.cat((scores[:, None], others[:, len(target) :]), 1)
        return F.cross_entropy(scores, target * 0)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight + of_genre(genre), self.bias).log_softmax(-1)


past = draw_users(1_000_000)[1]  # items that others bought
counts = past.bincount(minlength=K)
shares = (counts + 1) / (counts + 1).sum()
popular = counts.argsort(descending=True)[:4096]
hybrid = TreeLinear(WIDTH, K, order=shelf.argsort(), frequent=popular, sparse=True)
hybrid.start_from_counts(counts)
sampled, of_genre = SampledSoftmax(WIDTH, K), nn.Embedding(GENRES, WIDTH)
sampled.bias.data.copy_(shares.log())
for output, more in ((hybrid, hybrid.shortlist), (sampled, of_genre)):
    users = nn.EmbeddingBag(GENRES, WIDTH)
    dense = torch.optim.Adam([*users.parameters(), *more.parameters()], RATE)
    sparse = torch.optim.SparseAdam([output.weight, output.bias], RATE)
    ends, steps = time.process_time() + SECONDS, 0
    while time.process_time() < ends:
        genres, items = draw_users(512)
        output.nll(users(genres), items).backward()
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
    losses, hits = [], []
    for _ in range(10):  # tests
        genres, items = draw_users(40)
        with torch.no_grad():
            logs = output(users(genres))
        losses.append(F.nll_loss(logs, items).item())
        hits.append((logs.topk(100).indices == items[:, None]).any(1).float().mean().item())
    print(f"{type(output).__name__}: {steps} steps, test NLL {sum(losses) / 10:.2f}, ", end="")
    print(f"the item is among the best 100 in {sum(hits) / 10:.1%}")
