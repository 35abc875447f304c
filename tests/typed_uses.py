"""What type checkers and editors know of catnat: mypy reads this file, nothing runs it."""

from typing import assert_type

import torch

from catnat import HeadCategorical, MixedHead, NaturalHead, make_head
from catnat.losses import HeadNLL

head = make_head("natural", 4, mix=0.01)
scores, mask = torch.zeros(3), torch.ones(4, dtype=torch.bool)
q = head(scores)
assert_type(q, HeadCategorical)
assert_type(NaturalHead(4)(scores), HeadCategorical)
assert_type(MixedHead(head, 0.1)(scores, mask=mask), HeadCategorical)
assert_type(head.masked(scores, mask), torch.Tensor)
assert_type(head.allowed(scores), torch.Tensor)
assert_type(head.name, str)
assert_type(q.log_prob(torch.tensor(0)), torch.Tensor)
assert_type(q.sample((2,)), torch.Tensor)
assert_type(q.entropy(), torch.Tensor)
assert_type(q.one_hot_sample(), torch.Tensor)
assert_type(q.rsample(estimator="relaxed"), torch.Tensor)
assert_type(q.rsample((2,), estimator="straight-through"), torch.Tensor)
assert_type(q.expand((2,)), HeadCategorical)
assert_type(HeadNLL("natural", 4, tail=0.05).head(scores), HeadCategorical)
