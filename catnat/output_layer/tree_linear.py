"""TreeLinear: an output layer over K classes that costs log2 K rows of its weight for each row.

With frequent classes, it is a softmax over these classes and the event "rare", and a tree over the
rare classes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from catnat.checks import (
    checked_categories,
    require_at_least,
    require_choice,
    require_integer_within,
    require_positive,
    require_within,
)
from catnat.distributions import checked_value, path_entropy, path_kl
from catnat.heads.base import CategoricalHead, require_tensor
from catnat.heads.natural import DEFAULT_TAIL
from catnat.heads.registry import make_head
from catnat.heads.tree import CatnatHead, arranged
from catnat.losses import reduced
from catnat.numerics import (
    can_branch_on,
    exp_of_log_probs,
)
from catnat.output_layer import draws, search
from catnat.output_layer.convert import follow_softmax, likeliest
from catnat.output_layer.losses import distillation, regularized_losses
from catnat.output_layer.orders import (
    Frequent,
    by_cooccurrence,
    by_embedding,
    checked_frequent,
    is_number_of_classes,
    usual_frequent,
)
from catnat.output_layer.paths import PathArithmetic
from catnat.output_layer.ranks import asked_by_data_parallel, sparse_rows
from catnat.output_layer.shortlist import (
    start_evenly,
    uncapped,
    warn_of_rare,
)


class TreeLinear(PathArithmetic):
    r"""A linear layer and a tree head in one: from hidden states (*, D) to K classes.

    ``head(linear(hidden))`` computes K - 1 scores. A class needs only the scores on its path, so a
    log-probability, a sample and their gradients use only log2 K rows of the weight here.

    With F ``frequent`` classes, the layer is a softmax over these classes and one additional event,
    "rare", and a tree over the other classes: p(k) = softmax(k) for a frequent class, and
    p(k) = softmax(rare) tree(k) for a rare one. The softmax adds F + 1 rows. This
    improves the quality for words and other classes with very different frequencies.

    Args:
        in_features: width of the hidden states (D).
        num_categories: number of classes (K), at least 2.
        head: the name of a tree head (sigmoid, natural, one of your own), or such a head over as
            many categories as there are rare classes. ``"natural"`` has a tail of 0.05 here,
            because an impossible class has an infinite loss; ``tail=0`` is the paper's.
        order: the leaf of each class, a permutation of 0..K-1; None for class k on leaf k. How
            well the layer learns depends on which classes share a subtree, see
            :mod:`catnat.output_layer.orders`. A tree of rare classes holds them in this order.
        bias: whether nodes have a bias.
        frequent: the classes of the softmax: their number F (the first F classes, as vocabularies
            are sorted), or the classes themselves. 0 (the tree alone) to K - 2. The default is
            0, because the layer cannot know which classes are frequent.
        sparse: give the tree's weight and bias sparse gradients with the rows in use, as
            ``nn.Embedding(sparse=True)`` does, for ``torch.optim.SparseAdam``. That saves memory,
            and time on a CPU. On CUDA dense gradients are faster: fused kernels compute them.
            The parameters of ``shortlist`` always have dense ones.
        soft_cap: c, which bounds the logits l of the softmax by c tanh(l / c); None: no bound.
        device: device of the parameters.
        dtype: dtype of the parameters.
        options: options of the head, such as ``tail`` for natural.

    ``weight`` and ``bias`` have a row for each node, breadth first: K - 1, or K - F - 1 for the
    tree of rare classes. ``shortlist`` is the ``nn.Linear`` of the softmax, with F + 1 rows, the
    last one for "rare"; None without frequent classes. A state dict holds these and ``order``, the
    place of each class: the frequent ones come first, in the order of the shortlist's rows.

    Under autocast the matmuls of a GPU are in half precision; the activations are in float32. On
    a CPU, autocast changes nothing.

    >>> layer = TreeLinear(4, 1000, frequent=100)
    >>> layer(torch.zeros(3, 4), target=torch.tensor([7, 0, 999])).shape
    torch.Size([])
    >>> layer.sample(torch.zeros(3, 4)).shape
    torch.Size([3])
    """

    def __init__(
        self,
        in_features: int,
        num_categories: int,
        head: str | CategoricalHead = "sigmoid",
        order: Tensor | Sequence[int] | None = None,
        bias: bool = True,
        *,
        frequent: Frequent = 0,
        sparse: bool = False,
        soft_cap: float | None = None,
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
        if soft_cap is not None:
            require_positive(soft_cap=soft_cap)
        self.soft_cap = soft_cap
        self.head = tree_head.to(device)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        nodes = tree_head.num_scores
        self.weight = nn.Parameter(torch.empty(nodes, in_features, **placed))
        self.bias = nn.Parameter(torch.empty(nodes, **placed)) if bias else None
        self.shortlist = None
        if self.num_frequent:
            self.shortlist = nn.Linear(in_features, self.num_frequent + 1, bias, **placed)
        self._place_classes(frequent_classes, self.weight.device)
        if order is not None:
            self.set_order(order)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and biases as ``nn.Linear`` does, and restore the order last set.

        The bias of "rare" is the logarithm of the number of rare classes instead, so that all
        classes begin about equally likely.
        """
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)
        if self.shortlist is not None:
            self.shortlist.reset_parameters()
            start_evenly(self.shortlist, self.num_categories - self.num_frequent, self.soft_cap)
        self._choose_order(self._chosen_order)

    @torch.no_grad()
    def start_from_counts(self, counts: Tensor) -> None:
        """Set the biases so that zero weights give the frequencies of the classes.

        One is added to every count, so that no class is impossible. Warns if the layer's frequent
        classes are far from the most frequent ones.

        Args:
            counts: how often each class occurs, (K,).
        """
        K, F = self.num_categories, self.num_frequent
        if counts.shape != (K,) or bool((counts < 0).any()):
            raise ValueError(f"expected {K} counts >= 0, got shape {tuple(counts.shape)}")
        if self.bias is None:
            raise ValueError("start_from_counts needs a layer with biases")
        warn_of_rare(counts, self.classes[:F].to(counts.device))
        shares = counts.detach().to(self.bias.device, torch.float64) + 1
        shares = shares / shares.sum()
        shares = shares[self.classes]
        rare_share = shares[F:].sum()
        self.bias.copy_(self.head.inverse(shares[F:] / rare_share))
        if self.shortlist is not None:
            logits = torch.cat((shares[:F], rare_share[None])).log()
            self.shortlist.bias.copy_(uncapped(logits, self.soft_cap))

    @classmethod
    def from_counts(
        cls,
        counts: Tensor,
        in_features: int,
        frequent: Frequent | None = None,
        cooccurrence: Tensor | None = None,
        **options: Any,
    ) -> Self:
        """A layer whose frequent classes, order and biases come from counts.

        Args:
            counts: how often each class occurs, (K,).
            in_features: width of the hidden states (D).
            frequent: number of frequent classes, those with the largest counts; or the classes.
                None: 4,096, or half of all classes if that is less.
            cooccurrence: a sequence of classes, such as a text, for an order by
                :func:`catnat.output_layer.orders.by_cooccurrence`. None: rare classes are sorted
                by their counts.
            options: options of the layer, such as ``head`` and ``device``.
        """
        K = len(counts)
        if frequent is None:
            frequent = usual_frequent(K)
        if is_number_of_classes(frequent):
            frequent = counts.topk(len(checked_frequent(frequent, K))).indices
        if cooccurrence is None:
            order = counts.argsort(descending=True, stable=True).argsort()
        else:
            order = by_cooccurrence(cooccurrence, K, frequent)
        layer = cls(in_features, K, order=order, frequent=frequent, **options)
        layer.start_from_counts(counts)
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        hidden: Tensor,
        frequent: Frequent | None = None,
        order: Tensor | Sequence[int] | None = None,
        *,
        fitted: int = 255,
        **options: Any,
    ) -> Self:
        """A layer that is near the softmax of a trained linear layer, without training.

        The logits of frequent classes do not change. The scores of the nodes and of "rare" are
        linear approximations at the hidden states, see :mod:`catnat.output_layer.convert`. The
        conversion cannot be reversed: no linear logits give the probabilities of a tree.

        Args:
            linear: a trained linear layer with K rows.
            hidden: a few thousand inputs of the linear layer, (*, D).
            frequent: number of frequent classes, the likeliest ones at these hidden states; or the
                classes. None: 4,096, or half of all classes if that is less.
            order: the leaf of each class; None: :func:`catnat.output_layer.orders.by_embedding` of
                the layer's rows.
            fitted: number of nodes that are fitted by least squares, which takes N D^2 operations
                each; 0 for the expansion alone.
            options: options of the layer, such as ``dtype``.
        """
        K, D = linear.weight.shape
        require_tensor(hidden, "features of hidden states", D)
        hidden = hidden.detach().reshape(-1, D).to(linear.weight.device)
        if not len(hidden):
            raise ValueError("from_linear needs hidden states, got none")
        require_at_least(0, fitted=fitted)
        if frequent is None:
            frequent = usual_frequent(K)
        if is_number_of_classes(frequent):
            frequent = likeliest(linear, hidden, len(checked_frequent(frequent, K)))
        if order is None:
            order = by_embedding(linear.weight, frequent)
        like_linear: dict[str, Any] = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        layer = cls(D, K, order=order, frequent=frequent, **(like_linear | options))
        if layer.head.name != "sigmoid" or layer.bias is None or layer.soft_cap is not None:
            raise ValueError(
                "from_linear makes layers with the head sigmoid, biases and no soft_cap, got "
                f"{layer.head.name}, bias={layer.bias is not None}, soft_cap={layer.soft_cap}"
            )
        follow_softmax(layer, linear, hidden, fitted)
        return layer

    def forward(self, hidden: Tensor, target: Tensor | None = None, **options: Any) -> Tensor:
        """:meth:`nll` of the targets with its options, or without targets :meth:`log_probs`."""
        return self.log_probs(hidden) if target is None else self.nll(hidden, target, **options)

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
        *,
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Negative log-likelihood of the targets, as ``F.cross_entropy`` reduces it.

        Every option costs O(D log K) and the softmax of the frequent classes.

        Args:
            hidden: (*, D).
            target: classes, (*).
            ignore_index: targets of this value do not count.
            reduction: "mean" (over the targets that count, by their weights), "sum" or "none".
            label_smoothing: share of the probability that is distributed evenly over the sides of
                each split on the target's path, and over the events of the softmax.
                ``F.cross_entropy`` smooths over all classes instead, which needs all scores.
            weight: factor of the loss of each class, (K,).
            z_loss: factor of the squared log-normalizer of the softmax over frequent classes, such
                as 1e-4. Splits have no normalizer.
        """
        require_choice(("mean", "sum", "none"), reduction=reduction)
        require_within(0, 1, label_smoothing=label_smoothing)
        require_at_least(0, z_loss=z_loss)
        if z_loss and self.shortlist is None:
            raise ValueError("z_loss is for the softmax of frequent classes; the layer has none")
        if target.is_floating_point():
            raise ValueError(
                "targets are classes; a loss of probabilities of all classes needs all scores: "
                "distill estimates it from sampled paths"
            )
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
        if label_smoothing or z_loss:
            losses = regularized_losses(self, rows, classes, label_smoothing, z_loss)
        else:
            losses = -self._log_prob(rows, classes)
        losses = torch.where(counts, losses, 0.0)
        weights = counts
        if weight is not None:
            if weight.shape != (self.num_categories,):
                expected = f"expected a weight for each of {self.num_categories} classes"
                raise ValueError(f"{expected}, got shape {tuple(weight.shape)}")
            categories = classes.clamp(0, self.num_categories - 1)  # a GPU cannot refuse others
            weights = torch.where(counts, weight.to(losses)[categories], 0.0)
            losses = losses * weights
        return reduced(losses.view(hidden.shape[:-1]), weights, reduction)

    def distill(
        self,
        hidden: Tensor,
        teacher: Tensor,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Estimates of the KL divergence from a teacher's softmax, (*, D), (*, K) -> (*).

        The teacher draws rare classes, and the divergences of the splits on their paths estimate
        that of the tree, without bias. The divergence between the softmaxes of frequent classes is
        exact. The layer computes the scores on these paths alone.

        Args:
            hidden: hidden states, (*, D).
            teacher: logits of all classes, (*, K); they get no gradient.
            num_samples: number of paths for each hidden state.
            generator: source of the noise.
        """
        require_at_least(1, num_samples=num_samples)
        hidden = self._checked(hidden)
        shape = hidden.shape[:-1]
        if teacher.shape != (*shape, self.num_categories):
            expected = f"expected teacher logits {(*shape, self.num_categories)}"
            raise ValueError(f"{expected}, got shape {tuple(teacher.shape)}")
        rows = hidden.reshape(-1, self.in_features)
        logits = teacher.reshape(-1, self.num_categories)
        return distillation(self, rows, logits, num_samples, generator).view(shape)

    @torch.no_grad()
    def sample(
        self,
        hidden: Tensor,
        sample_shape: Sequence[int] = (),
        generator: torch.Generator | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Tensor:
        """Random classes, (*, D) -> (*sample_shape, *), by a walk from the root to a leaf.

        The options have the meaning and the order that they have in Transformers' ``generate``.
        With ``top_k``, or with ``top_p`` alone, the likeliest classes are searched for, see
        :meth:`topk`, and the draws are exact. A temperature other than 1 without ``top_k`` changes
        the probabilities of all classes, so all of them are computed, a few rows at a time.

        Args:
            hidden: (*, D).
            sample_shape: shape of the draws for each hidden state.
            generator: random number generator; None is torch's own.
            temperature: divisor of the log-probabilities, > 0; towards 0 the likeliest class
                becomes certain.
            top_k: number of likeliest classes that are kept, 1 to K; None keeps all.
            top_p: total probability, 0 < top_p <= 1, of the smallest set of likeliest classes that
                is kept; None keeps all.
        """
        hidden = self._checked(hidden)
        states = hidden.reshape(-1, self.in_features)
        repeats = math.prod(sample_shape)
        if temperature == 1 and top_k is None and top_p is None:
            classes = self._classes_at(draws.sample(self, states, repeats, generator))
        else:
            options = temperature, top_k, top_p
            classes = draws.sample_filtered(self, states, repeats, generator, *options)
        self._require_drawn(classes)
        return classes.view((*sample_shape, *hidden.shape[:-1]))

    def sample_without_replacement(
        self, hidden: Tensor, k: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """k different classes and their log-probabilities, (*, D) -> (k, *) each.

        They are in the order of their draws and cost O(D k log K), see
        :meth:`catnat.CategoricalHead.sample_without_replacement`. The log-probabilities have a
        gradient.
        """
        require_integer_within(1, self.num_categories, k=k)
        hidden = self._checked(hidden)
        states = hidden.reshape(-1, self.in_features)
        with torch.no_grad():
            classes = self._classes_at(draws.sample_different(self, states, k, generator))
        self._require_drawn(classes)
        values = classes.reshape(k, *hidden.shape[:-1])
        return values, self.log_prob(hidden, values)

    def _require_drawn(self, classes: Tensor) -> None:
        """Raise an error where a NaN gave no class, if looking does not wait for a device."""
        if can_branch_on(classes) and bool((classes < 0).any()):
            raise ValueError("scores must be numbers to draw samples, got NaN")

    def path_kl(
        self, hidden: Tensor, other: Tensor, value: Tensor, layer: "TreeLinear | None" = None
    ) -> Tensor:
        """Estimate of a KL divergence from classes drawn at ``hidden``, (*) each, at O(D log K).

        It is unbiased and never negative, see :meth:`catnat.HeadCategorical.path_kl`. The
        divergence between the softmaxes of frequent classes is exact.

        Args:
            hidden: the states of the distribution that the classes were drawn from, (*, D).
            other: the states of the other distribution, (*, D').
            value: the classes, (*).
            layer: layer of the other distribution, with the same order of classes; None is
                this layer.
        """
        layer = layer or self
        if not self._is_placed_like(layer):
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
        In a large layer, a search computes the shortlist and few nodes of the tree, and reads only
        their rows of the weight. The result is exact. In other layers, all classes are computed, a
        few rows at a time. The results have no gradient.
        """
        require_integer_within(1, self.num_categories, k=k)
        hidden = self._checked(hidden)
        states = hidden.reshape(-1, self.in_features)
        with torch.no_grad():
            values, classes = search.topk(self, states, k)
        shape = (*hidden.shape[:-1], k)
        return torch.return_types.topk((values.view(shape), classes.view(shape)))

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

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules in this one; DistributedDataParallel gets sparse parameters in a stand-in."""
        if self.sparse and asked_by_data_parallel():
            yield prefix, sparse_rows(self.weight, self.bias)
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def extra_repr(self) -> str:
        """Return the text that ``print(layer)`` shows."""
        options = f"in_features={self.in_features}, num_categories={self.num_categories}"
        if self.num_frequent:
            options += f", frequent={self.num_frequent}"
        if self.soft_cap is not None:
            options += f", soft_cap={self.soft_cap}"
        return f"{options}, bias={self.bias is not None}, sparse={self.sparse}"
