"""An output layer for causal language models of Hugging Face Transformers.

The layer is a softmax over the frequent tokens and a tree over all other tokens. It works with any
``AutoModelForCausalLM``, see :func:`replace_head`.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from catnat.losses import reduced
from catnat.output_layer import TreeLinear
from catnat.output_layer.orders import (
    Frequent,
    checked_frequent,
    is_number_of_classes,
    usual_frequent,
)

_OPTIONS = "tree_head"  # where a config holds the options of the output layer
_LOSS_TYPE = "ForCausalLM"  # which tells Trainer to count targets after the shift of labels


def replace_head(
    model: PreTrainedModel,
    frequent: Frequent | None = None,
    *,
    head: str = "sigmoid",
    order: Tensor | Sequence[int] | None = None,
    counts: Tensor | None = None,
    tokens: Tensor | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Replace the last linear layer of a causal language model by a :class:`catnat.TreeLinear`.

    With ``tokens``, the new layer approximates the old one. Without them, it is untrained. The
    model changes in place. With ``labels``, it returns a loss without logits. Without labels, its
    logits are the log-probabilities of all tokens. It supports ``Trainer``, ``generate`` and
    adapters of PEFT. ``save_pretrained`` saves it, and :func:`from_pretrained` loads it again.

    Args:
        model: a model of ``AutoModelForCausalLM``, such as GPT-2 or Llama.
        frequent: the frequent tokens, or their number F. A number selects the F tokens with the
            largest counts if ``counts`` is given, the F likeliest tokens under the model if
            ``tokens`` is given, and the first F tokens otherwise. None: 4,096, or half of all
            tokens if that is less.
        head: name of a tree head.
        order: the leaf of each token, see :mod:`catnat.output_layer.orders`.
        counts: number of occurrences of each token in the text, (K,). Without ``tokens``, the
            biases start from them.
        tokens: a few thousand tokens of the text, (B, T), for a trained model, see
            :meth:`catnat.TreeLinear.from_linear`.
        options: options of the tree head, such as ``tail``, and ``bias``.
    """
    name, linear = _output(model)
    num_tokens, width = linear.weight.shape
    if frequent is None:
        frequent = usual_frequent(num_tokens)
    if counts is not None and is_number_of_classes(frequent):
        frequent = _most_frequent(counts, frequent, num_tokens)
    if tokens is not None:
        hidden = _inputs_of(linear, model, tokens)
        layer = LanguageModelHead.from_linear(linear, hidden, frequent, order, head=head, **options)
    else:
        placed: dict[str, Any] = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        layer = LanguageModelHead(
            width, num_tokens, head, order, frequent=frequent, **placed, **options
        )
        if counts is not None:
            layer.start_from_counts(counts)
    if linear.weight is model.get_input_embeddings().weight:
        warnings.warn(
            f"{type(model).__name__} shares the weight of its last layer with the embedding of its "
            "tokens. The embedding keeps it; the new layer has weights of its own",
            stacklevel=2,
        )
    model.config.tie_word_embeddings = False
    options.pop("fitted", None)  # of the conversion
    saved = {"name": name, "head": head, "frequent": layer.num_frequent, **options}
    setattr(model.config, _OPTIONS, saved)
    if hasattr(model, "all_tied_weights_keys"):
        model.all_tied_weights_keys = {}
    setattr(model, name, layer)
    model.loss_type = _LOSS_TYPE
    base: Any = type(model)
    model.__class__ = with_tree(base)
    return model


def from_pretrained(path: str, **options: Any) -> PreTrainedModel:
    """Load a model that :func:`replace_head` has changed and ``save_pretrained`` has saved.

    Args:
        path: the folder, or a name on the hub.
        options: of Transformers' ``from_pretrained``, such as ``dtype`` and ``device_map``.
    """
    config = AutoConfig.from_pretrained(path)
    if not hasattr(config, _OPTIONS):
        raise ValueError(f"{path} has no output layer of catnat; load it with AutoModelForCausalLM")
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    loaded: PreTrainedModel = with_tree(base).from_pretrained(path, config=config, **options)
    return loaded


class LanguageModelHead(TreeLinear):
    """An output layer that a model calls in place of its ``lm_head``.

    It returns the log-probabilities of all tokens, or the losses of ``targets`` if they are set.
    """

    targets: Tensor | None = None
    ignore_index: int = -100
    losses: Tensor | None = None

    def forward(self, hidden: Tensor, target: Tensor | None = None, **options: Any) -> Tensor:
        """Log-probabilities (*, K); losses (*) of targets."""
        if target is None and self.targets is not None:
            self.losses = self.nll(hidden, self.targets, self.ignore_index, "none")
            return self.losses
        return super().forward(hidden, target, **options)


@functools.cache
def with_tree(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of models of a class whose last layer is an output layer of catnat."""

    class Tree(base):  # type: ignore[misc, valid-type]
        _tied_weights_keys: Any = {}  # rows of the layer are nodes, not tokens

        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            saved = dict(getattr(config, _OPTIONS))
            name = saved.pop("name")
            width = self.get_output_embeddings().in_features
            setattr(self, name, LanguageModelHead(width, config.vocab_size, **saved))
            self.loss_type = _LOSS_TYPE

        @functools.wraps(base.forward)  # Trainer chooses the columns of data by the signature
        def forward(self, *args: Any, **inputs: Any) -> Any:
            labels = inputs.get("labels")
            if labels is None:
                return super().forward(*args, **inputs)
            layer = self.get_output_embeddings()
            layer.ignore_index = inputs.get("ignore_index", -100)
            layer.targets = inputs.get("shift_labels")
            if layer.targets is None:
                padded = nn.functional.pad(labels, (0, 1), value=layer.ignore_index)
                layer.targets = padded[..., 1:].contiguous()
            as_dict = inputs.pop("return_dict", None)
            try:
                output = super().forward(*args, **inputs, return_dict=True)
            finally:
                layer.targets = layer.losses = None
            output.logits = None
            if as_dict is None:
                as_dict = getattr(self.config, "return_dict", True)
            return output if as_dict else output.to_tuple()

        def loss_function(
            self,
            logits: Tensor,
            labels: Tensor,
            num_items_in_batch: Tensor | int | None = None,
            **_: Any,
        ) -> Tensor:
            """The loss from what the layer returned in place of logits."""
            layer = self.get_output_embeddings()
            if logits is not layer.losses:
                raise ValueError(
                    f"{base.__name__} changes the logits of its last layer (a scale or a cap), "
                    "which a layer without all scores cannot follow"
                )
            counted = layer.targets != layer.ignore_index
            if num_items_in_batch is None:
                return reduced(logits, counted, "mean")
            if isinstance(num_items_in_batch, Tensor):
                num_items_in_batch = num_items_in_batch.to(logits.device)
            return reduced(logits, counted, "sum") / num_items_in_batch

        def resize_token_embeddings(
            self, new_num_tokens: int | None = None, *args: Any, **options: Any
        ) -> nn.Module:
            tokens = self.get_input_embeddings()
            if new_num_tokens in (None, tokens.num_embeddings) and not (args or options):
                return tokens
            raise ValueError(
                f"a tree over {self.config.vocab_size} tokens cannot become one over "
                f"{new_num_tokens}: call resize_token_embeddings first, then replace_head"
            )

        def _get_name(self) -> str:
            return base.__name__  # by which Trainer knows that labels are to be shifted

    Tree.__name__ = Tree.__qualname__ = f"Tree{base.__name__}"
    Tree.__module__ = base.__module__
    return Tree


def _output(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """The last linear layer of a model, and its name."""
    found = model.get_output_embeddings()
    names = [name for name, module in model.named_children() if module is found]
    if not names or not isinstance(found, nn.Linear):
        raise ValueError(
            f"expected a causal language model that ends in nn.Linear, got "
            f"{type(model).__name__}, which ends in {type(found).__name__}"
        )
    return names[0], found


@torch.no_grad()
def _inputs_of(linear: nn.Linear, model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The hidden states that a model gives its last layer, (B, T) -> (B T, D)."""
    was_training = model.training
    states: list[Tensor] = []
    hook = linear.register_forward_pre_hook(
        lambda _, inputs: states.append(inputs[0].flatten(0, 1))
    )
    model.eval()
    try:
        for part in tokens.to(linear.weight.device).split(8):
            model(part)
    finally:
        hook.remove()
        model.train(was_training)
    return torch.cat(states)


def _most_frequent(counts: Tensor, frequent: Frequent, num_tokens: int) -> Tensor:
    number = len(checked_frequent(frequent, num_tokens))
    if counts.shape != (num_tokens,):
        raise ValueError(f"expected {num_tokens} counts, got shape {tuple(counts.shape)}")
    return counts.topk(number).indices


__all__ = ["LanguageModelHead", "from_pretrained", "replace_head", "with_tree"]
