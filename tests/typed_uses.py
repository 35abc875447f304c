"""What type checkers and editors know of catnat: mypy reads this file, nothing runs it."""

from typing import assert_type

import torch

from catnat import HeadCategorical, NaturalHead, make_head

assert_type(make_head("natural", 4)(torch.zeros(3)), HeadCategorical)
assert_type(NaturalHead(4)(torch.zeros(3)), HeadCategorical)
assert_type(NaturalHead(4)(torch.zeros(3)).rsample_relaxed(0.5), torch.Tensor)
