"""TreeLinear: an output layer over K classes that costs log2 K rows of its weight for each row.

With frequent classes it is a softmax over these and one more, "rare", and a tree over the others.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from catnat.checks import (
    checked_categories,
    checked_order,
    require_at_least,
    require_choice,
    require_within,
)
from catnat.distributions import checked_value, draw, path_entropy, path_kl
from catnat.head import CategoricalHead, require_tensor
from catnat.heads import make_head
from catnat.kernels.dispatch import HAS_TRITON
from catnat.kernels.reference import constants_at, path_logs
from catnat.losses import reduced
from catnat.natural import DEFAULT_TAIL
from catnat.numerics import (
    LOG_ZERO,
    at_least_float32,
    can_branch_on,
    exp_of_log_probs,
    floored_sums,
    uniform,
    without_autocast,
)
from catnat.orders import checked_frequent
from catnat.tree import walk_down
from catnat.tree_heads import CatnatHead, arranged, looked_up

if TYPE_CHECKING:
    from catnat.kernels.triton_layer import FusedTree

_CHUNK = 2**24  # numbers that a method without gradient holds at once
_ALIGNED = 8  # rows of the softmax come in such groups: GPUs multiply aligned matrices faster


class TreeLinear(nn.Module):
    r"""A linear layer and a tree head in one: from hidden states (*, D) to K classes.

    ``head(linear(hidden))`` computes K - 1 scores. A class needs those on its path alone: the
    log-probability of a target, a sample and their gradients take log2 K rows of the weight here.

    With ``frequent`` classes F, the layer is a softmax over these and one event more, "rare", and
    a tree over the other classes: p(k) = softmax(k) for a frequent class, and
    p(k) = softmax(rare) tree(k) for a rare one. That costs F + 1 rows more. Words of a text and
    other classes of very different frequency are learned better that way.

    Args:
        in_features: D.
        num_categories: K, at least 2.
        head: the name of a tree head (sigmoid, natural, one of your own), or such a head over as
            many categories as there are rare classes. ``"natural"`` has a tail of 0.05 here,
            because a likelihood does not forgive impossible classes; ``tail=0`` is the paper's.
        order: the leaf of each class, a permutation of 0..K-1; None for class k on leaf k. Which
            classes share a subtree decides how well the layer learns, see :mod:`catnat.orders`.
            A tree of rare classes holds them in this order.
        bias: whether nodes have a bias.
        frequent: the classes of the softmax: their number F (the first F classes, as vocabularies
            are sorted), or the classes themselves. 0 (the tree alone) to K - 2. The default is
            0, because the layer cannot know which classes are frequent.
        sparse: give the tree's weight and bias sparse gradients with the rows in use, as
            ``nn.Embedding(sparse=True)`` does, for ``torch.optim.SparseAdam``. That saves memory,
            and time on a CPU. On CUDA dense gradients are faster: fused kernels compute them.
            The parameters of ``shortlist`` always have dense ones.
        device: of the parameters.
        dtype: of the parameters.
        options: of the head, such as ``tail`` for natural.

    ``weight`` and ``bias`` have a row for each node, breadth first: K - 1, or K - F - 1 for the
    tree of rare classes. ``shortlist`` is the ``nn.Linear`` of the softmax, with F + 1 rows, the
    last one for "rare"; None without frequent classes. A state dict holds these, and ``order`` if
    there is one: there frequent classes come first, in the order of the shortlist's rows.

    Under autocast the matmuls of a GPU are in half precision; the activations are in float32. On
    a CPU, autocast changes nothing.

    >>> layer = TreeLinear(4, 1000, frequent=100)
    >>> layer(torch.zeros(3, 4), target=torch.tensor([7, 0, 999])).shape
    torch.Size([])
    >>> layer.sample(torch.zeros(3, 4)).shape
    torch.Size([3])
    """

    bias: nn.Parameter | None
    order: Tensor | None  # the place of each class: in the shortlist, then on the leaves
    classes: Tensor | None  # the class at each place
    shortlist: nn.Linear | None

    def __init__(
        self,
        in_features: int,
        num_categories: int,
        head: str | CategoricalHead = "sigmoid",
        order: Tensor | Sequence[int] | None = None,
        bias: bool = True,
        *,
        frequent: int | Sequence[int] | Tensor = 0,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        require_at_least(1, in_features=in_features)
        checked_categories(num_categories)
        frequent_classes = checked_frequent(frequent, num_categories)
        self.num_frequent = len(frequent_classes)
        if head in ("natural", "catnat-natural"):
            options = {"tail": DEFAULT_TAIL} | options
        tree_head = make_head(head, num_categories - self.num_frequent, **options)
        if not isinstance(tree_head, CatnatHead):
            got = f"{tree_head.name!r} ({type(tree_head).__name__})"
            raise ValueError(f"TreeLinear needs a tree head, such as sigmoid or natural, got {got}")
        if tree_head.order is not None:
            raise ValueError("the head has an order of its own; give the order to TreeLinear")
        self.in_features = in_features
        self.num_categories = num_categories
        self.sparse = sparse
        self.head = tree_head.to(device)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        nodes = tree_head.num_scores
        self.weight = nn.Parameter(torch.empty(nodes, in_features, **placed))
        self.bias = nn.Parameter(torch.empty(nodes, **placed)) if bias else None
        self.shortlist = None
        if self.num_frequent:
            self.shortlist = nn.Linear(in_features, self.num_frequent + 1, bias, **placed)
        self.register_buffer("order", None)
        self.register_buffer("classes", None, persistent=False)
        self._frequent = frequent_classes
        self.set_order(order)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and biases as ``nn.Linear`` does; after ``to_empty``, restore the order."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)
        if self.shortlist is not None:
            self.shortlist.reset_parameters()
        self._set_places(self._cpu_places)

    @torch.no_grad()
    def start_from_counts(self, counts: Tensor) -> None:
        """Set the biases so that zero weights give the frequencies of the classes.

        One is added to every count, so that no class is impossible.

        Args:
            counts: how often each class occurs, (K,).
        """
        K, F = self.num_categories, self.num_frequent
        if counts.shape != (K,) or bool((counts < 0).any()):
            raise ValueError(f"expected {K} counts >= 0, got shape {tuple(counts.shape)}")
        if self.bias is None:
            raise ValueError("start_from_counts needs a layer with biases")
        shares = counts.detach().to(self.bias.device, torch.float64) + 1
        shares = shares / shares.sum()
        if self.classes is not None:
            shares = shares[self.classes]
        rare_share = shares[F:].sum()
        self.bias.copy_(self.head.inverse(shares[F:] / rare_share))
        if self.shortlist is not None:
            self.shortlist.bias.copy_(torch.cat((shares[:F], rare_share[None])).log())

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """:meth:`nll` of the targets, or without targets :meth:`log_probs`."""
        return self.log_probs(hidden) if target is None else self.nll(hidden, target)

    def log_prob(self, hidden: Tensor, value: Tensor) -> Tensor:
        """Log-probabilities of classes, (*, D), (*) -> (*) in O(D log K) each.

        ``value`` is broadcast against the leading dimensions of ``hidden``.
        """
        rows, classes, shape = self._broadcast(hidden, value)
        return self._log_prob(rows, classes).view(shape)

    def nll(
        self,
        hidden: Tensor,
        target: Tensor,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Tensor:
        """Negative log-likelihood of the targets, as ``F.cross_entropy`` reduces it.

        Args:
            hidden: (*, D).
            target: classes, (*).
            ignore_index: targets of this value do not count.
            reduction: "mean" (over the targets that count), "sum" or "none".
        """
        require_choice(("mean", "sum", "none"), reduction=reduction)
        hidden = self._checked(hidden)
        if target.shape != hidden.shape[:-1]:
            shapes = f"{tuple(target.shape)} for hidden states {tuple(hidden.shape)}"
            raise ValueError(f"expected one target for each hidden state, got shape {shapes}")
        target = target.flatten()
        counts = target != ignore_index
        if can_branch_on(target):
            checked_value(target[counts], self.num_categories, "target")
        classes = torch.where(counts, target.long(), -1)
        rows = hidden.reshape(-1, self.in_features)
        losses = torch.where(counts, -self._log_prob(rows, classes), 0.0)
        return reduced(losses.view(hidden.shape[:-1]), counts, reduction)

    @torch.no_grad()
    def sample(
        self,
        hidden: Tensor,
        sample_shape: Sequence[int] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Random classes, (*, D) -> (*sample_shape, *), by a walk from the root to a leaf."""
        hidden = self._checked(hidden)
        states = hidden.reshape(-1, self.in_features)
        repeats = math.prod(sample_shape)
        if self.shortlist is not None:
            probs = self._block(states).exp()
            is_nan = probs.isnan().any(-1)
            probs = torch.where(is_nan[:, None], 1.0, probs)
            column = draw(probs, torch.Size((repeats,)), generator)
            column = torch.where(is_nan, -1, column).flatten()
        leaf = self._draw_leaves(states, repeats, generator)
        place = torch.where(leaf < 0, -1, leaf + self.num_frequent)
        if self.shortlist is not None:
            place = torch.where(column < self.num_frequent, column, place)
        if can_branch_on(place) and bool((place < 0).any()):
            raise ValueError("scores must be numbers to draw samples, got NaN")
        return looked_up(place, self.classes).view((*sample_shape, *hidden.shape[:-1]))

    def path_kl(
        self, hidden: Tensor, other: Tensor, value: Tensor, layer: "TreeLinear | None" = None
    ) -> Tensor:
        """Estimate of a KL divergence from classes drawn at ``hidden``, (*) each, at O(D log K).

        Unbiased and never negative, see :meth:`catnat.HeadCategorical.path_kl`. The divergence
        between the softmaxes of frequent classes is exact.

        Args:
            hidden: the states of the distribution that the classes were drawn from, (*, D).
            other: the states of the other distribution, (*, D').
            value: the classes, (*).
            layer: of the other distribution, with the same order of classes; None: this one.
        """
        layer = layer or self
        places = self._cpu_places
        other_places = layer._cpu_places
        is_alike = places is other_places
        if places is not None and other_places is not None:
            is_alike = torch.equal(places, other_places)
        is_as_large = self.head.tree_id == layer.head.tree_id
        if not is_alike or not is_as_large or self.num_frequent != layer.num_frequent:
            raise ValueError("path_kl needs two layers with the same order of the same classes")
        ours = self._path_logs(hidden, value)
        theirs = layer._path_logs(other, value)
        below = path_kl(ours[:2], theirs[:2])
        if ours[2] is None or theirs[2] is None:
            return below
        exact = (exp_of_log_probs(ours[2]) * (ours[2] - theirs[2])).sum(-1).clamp_min(0)
        return exact + self._of_rare(below, ours[2])

    def path_entropy(self, hidden: Tensor, value: Tensor) -> Tensor:
        """Estimate of the entropy from classes drawn at ``hidden``, (*, D), (*) -> (*)."""
        *logs, block = self._path_logs(hidden, value)
        below = path_entropy(logs)
        if block is None:
            return below
        return self._of_rare(below, block) - (exp_of_log_probs(block) * block).sum(-1)

    def _of_rare(self, estimates: Tensor, block: Tensor) -> Tensor:
        """Estimates below the event "rare", with the gradient of the event's probability.

        They are 0 for frequent classes.
        """
        log_rare = block[..., -1]
        return estimates + estimates.detach() * (log_rare - log_rare.detach())

    def _path_logs(self, hidden: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities of the steps to classes, and of the other sides, (*, H) each.

        The third are the log-probabilities of the softmax, (*, F+1), if there is one. The steps to
        a frequent class are certain.
        """
        rows, classes, shape = self._broadcast(hidden, value)
        leaf = self._places(classes) - self.num_frequent
        step, aside = map(floored_sums, self._steps(rows, self.weight, self.bias, leaf))
        block = None
        if self.shortlist is not None:
            block = self._block(rows).view(*shape, -1)
            rare = (leaf >= 0)[:, None]
            step = torch.where(rare, step, 0.0)
            aside = torch.where(rare, aside, LOG_ZERO)
        return step.view(*shape, -1), aside.view(*shape, -1), block

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all classes, (*, D) -> (*, K)."""
        hidden = self._checked(hidden)
        places = self.head.log_probs(self.scores(hidden))
        if self.shortlist is not None:
            block = self._block(hidden)
            places = torch.cat((block[..., :-1], places + block[..., -1:]), -1)
        return arranged(places, self.order)

    def topk(self, hidden: Tensor, k: int) -> torch.return_types.topk:
        """The k likeliest classes and their log-probabilities, (*, D) -> (*, k) each, sorted.

        The result has ``values`` and ``indices``, as that of ``torch.topk``, and NaN comes first.
        All classes are computed, a few rows at a time. Without gradient.
        """
        require_within(1, self.num_categories, k=k)
        hidden = self._checked(hidden)
        rows = hidden.reshape(-1, self.in_features)
        size = max(64, _CHUNK // self.num_categories)
        with torch.no_grad():
            parts = [self.log_probs(part).topk(k, -1) for part in rows.split(size)]
        shape = (*hidden.shape[:-1], k)
        values, indices = (torch.cat(x).view(shape) for x in zip(*parts, strict=True))
        return torch.return_types.topk((values, indices))

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores of all nodes of the tree, (*, D) -> (*, nodes): what the head takes."""
        hidden = self._checked(hidden)
        return self._linear(hidden, self.weight, self.bias)

    def fisher(self, hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """Fisher information in the scores: a dense block and a diagonal, the rest is 0.

        Returns:
            The block of the softmax over frequent classes and "rare", (*, F+1, F+1), None without
            frequent classes; and the diagonal of the nodes of the tree, (*, nodes).
        """
        hidden = self._checked(hidden)
        diagonal = self.head.fisher_diagonal(self.scores(hidden))
        if self.shortlist is None:
            return None, diagonal
        probs = exp_of_log_probs(self._block(hidden))
        block = torch.diag_embed(probs) - probs[..., :, None] * probs[..., None, :]
        return block, probs[..., -1:] * diagonal

    def set_order(self, order: Tensor | Sequence[int] | None) -> None:
        """Give each class its leaf, as ``order`` of the class says; weights stay with their nodes.

        Frequent classes stay in the shortlist. For a layer that has learned nothing yet.
        """
        K, F = self.num_categories, self.num_frequent
        if order is None and self._frequent == list(range(F)):
            self._set_places(None)
            return
        keys = torch.arange(K, device="cpu")
        if order is not None:
            keys = torch.tensor(checked_order(order, K), device="cpu")
        keys[self._frequent] = torch.arange(-F, 0, device="cpu")
        self._set_places(keys.argsort().argsort())

    def _set_places(self, places: Tensor | None) -> None:
        """Take the place of each class, (K,) on the CPU."""
        self._cpu_places = places  # a layer on the device "meta" has its order here
        self.order = self.classes = None
        if places is not None:
            classes = places.argsort()
            self._frequent = classes[: self.num_frequent].tolist()
            self.order = places.to(self.weight.device)
            self.classes = classes.to(self.weight.device)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules in this one, after a stand-in that tells of sparse gradients.

        DistributedDataParallel expects sparse gradients of an ``nn.Embedding`` alone, and asks the
        first module that has a parameter.
        """
        if self.sparse:
            rows = nn.Embedding.from_pretrained(self.weight, sparse=True)
            rows.weight = self.weight
            rows.register_parameter("bias", self.bias)
            yield prefix, rows
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def extra_repr(self) -> str:
        """What ``print(layer)`` shows."""
        options = f"in_features={self.in_features}, num_categories={self.num_categories}"
        if self.num_frequent:
            options += f", frequent={self.num_frequent}"
        return f"{options}, bias={self.bias is not None}, sparse={self.sparse}"

    # -- the arithmetic ----------------------------------------------------------------------------

    def _log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        """(M, D), (M,) -> (M,); NaN for a target that is not a class."""
        fused = None if self.sparse else self._fused(hidden)
        if fused is None:
            of_tree = self._by_paths(hidden, self.weight, self.bias, target)
        else:
            of_tree = fused.log_prob(hidden, target, self.order, self.num_frequent, self._by_paths)
        if self.shortlist is None:
            return of_tree
        column = self._places(target).clamp(0, self.num_frequent)
        of_block = nn.functional.nll_loss(self._block(hidden), column, reduction="none")
        return of_tree - of_block

    def _block(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of the frequent classes and of "rare", (*, D) -> (*, F+1)."""
        assert self.shortlist is not None
        weight, bias = self.shortlist.weight, self.shortlist.bias
        missing = -len(weight) % _ALIGNED
        weight = nn.functional.pad(weight, (0, 0, 0, missing))
        logits = self._linear(hidden, weight, None)[..., : self.num_frequent + 1]
        logits = at_least_float32(logits)
        if bias is not None:
            logits = logits + bias.to(logits.dtype)
        return logits.log_softmax(-1)

    def _linear(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer in the dtype of the hidden states, whatever autocast says."""
        with without_autocast(hidden):
            bias = None if bias is None else bias.to(hidden.dtype)
            return nn.functional.linear(hidden, weight.to(hidden.dtype), bias)

    def _places(self, target: Tensor) -> Tensor:
        """The places of classes, (M,) -> (M,); -1 for a target that is not a class."""
        possible = (target >= 0) & (target < self.num_categories)
        return torch.where(possible, looked_up(target, self.order), -1)

    def _fused(self, hidden: Tensor) -> "FusedTree | None":
        """The tree for the fused kernels, where they take this layer."""
        if not (hidden.is_cuda and HAS_TRITON):
            return None
        from catnat.kernels.triton_layer import FusedTree

        tree = FusedTree(self.weight, self.bias, self.head.activation, self._constants(hidden))
        return tree if tree.takes(hidden) else None

    def _constants(self, hidden: Tensor) -> Tensor | None:
        """The constants of the nodes, for scores of these hidden states."""
        return self.head.constants(at_least_float32(hidden[:0]))

    def _by_paths(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
    ) -> Tensor:
        """What the tree adds to the log-probabilities of classes, in plain torch, (M, D) -> (M,).

        0 for frequent classes, and NaN for what is not a class.
        """
        place = self._places(target)
        leaf = place - self.num_frequent
        rare = leaf >= 0
        if can_branch_on(rare) and not bool(rare.all()):  # rows of other classes are not read
            steps = self._steps(hidden[rare], weight, bias, leaf[rare])[0]
            logs = steps.new_zeros(rare.shape).masked_scatter(rare, floored_sums(steps.sum(-1)))
        else:
            steps = self._steps(hidden, weight, bias, leaf)[0]
            logs = torch.where(rare, floored_sums(steps.sum(-1)), 0.0)
        return torch.where(place >= 0, logs, torch.nan)

    def _steps(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, leaf: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the steps to leaves, and of the other sides, (M, H) each."""

        def scores_at(nodes: Tensor) -> Tensor:
            rows = nn.functional.embedding(nodes, weight, sparse=self.sparse).to(hidden.dtype)
            scores = at_least_float32(torch.bmm(rows, hidden[:, :, None])[:, :, 0])
            if bias is None:
                return scores
            biases = torch.gather(bias, 0, nodes.flatten(), sparse_grad=self.sparse)
            return scores + biases.view_as(nodes).to(scores.dtype)

        head = self.head
        constants = self._constants(hidden)
        with without_autocast(hidden):
            return path_logs(scores_at, leaf, head.num_categories, head.activation, constants)

    def _draw_leaves(
        self, states: Tensor, repeats: int, generator: torch.Generator | None
    ) -> Tensor:
        """Leaves that random walks from the root reach, (M, D) -> (repeats M,); -1 for NaN."""
        head = self.head
        rows = torch.arange(len(states), device=states.device).repeat(repeats)
        uniforms = uniform((head.num_scores.bit_length(), len(rows)), states, generator)
        fused = self._fused(states)
        if fused is not None:
            return fused.sample(states, rows, uniforms)
        constants = self._constants(states)
        dtype = at_least_float32(states[:0]).dtype
        size = max(1, _CHUNK // self.in_features)

        def goes_right(nodes: Tensor, level: int) -> tuple[Tensor, Tensor]:
            parts = [
                (states[row] * self.weight[node].to(states.dtype)).sum(-1, dtype=dtype)
                for row, node in zip(rows.split(size), nodes.split(size), strict=True)
            ]
            scores = torch.cat(parts)
            if self.bias is not None:
                scores = scores + self.bias[nodes].to(scores.dtype)
            right = head.activation.log_activation(scores, constants_at(constants, nodes))[1]
            return uniforms[level] < right.double().exp(), right.isnan()

        return walk_down(head.num_categories, rows, goes_right)

    # -- what comes in and goes out ----------------------------------------------------------------

    def _broadcast(self, hidden: Tensor, value: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
        """Rows of hidden states and classes, (M, D) and (M,), and the shape that they stand for."""
        hidden = self._checked(hidden)
        classes = checked_value(value, self.num_categories)
        shape = torch.broadcast_shapes(hidden.shape[:-1], classes.shape)
        rows = hidden.expand(*shape, -1).reshape(-1, self.in_features)
        return rows, classes.expand(shape).reshape(-1), torch.Size(shape)

    def _checked(self, hidden: Tensor) -> Tensor:
        """Hidden states in the dtype of the matmuls."""
        require_tensor(hidden, "features of hidden states", self.in_features)
        device = hidden.device.type
        if device not in ("cpu", "meta") and torch.is_autocast_enabled(device):
            return hidden.to(torch.get_autocast_dtype(device))
        return hidden.to(self.weight.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take the order of the state dict; ``load_state_dict`` tells if it lacks one."""
        if (order := state_dict.get(f"{prefix}order")) is not None:
            places = checked_order(order, self.num_categories)
            self._set_places(torch.tensor(places, device="cpu"))
        super()._load_from_state_dict(state_dict, prefix, *rest)
