"""Which classes a command line names: the model, its data, and what fits them together."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

from catnat.checks import did_you_mean
from catnat.training.errors import UsageError
from catnat.training.help_pages import STEPS
from catnat.training.names import LIGHTNING_MODELS, Names, check_choice, import_module


@dataclass(frozen=True)
class Recipe:
    """How a model is trained if the command line says nothing else.

    Args:
        model: path of the class; None for a model that is none of ours.
        data: name of the data; None if the command line must give it.
        steps: with an accelerator.
        steps_on_cpu: without.
        defaults: of options of the data.
        links: options of the model that follow from one of the data, as (option of the data,
            option of the model, path of a function between them).
    """

    model: str | None = None
    data: str | None = None
    steps: int = STEPS["vae"][0]
    steps_on_cpu: int = STEPS["vae"][1]
    defaults: dict[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str, str | None], ...] = ()


RECIPES = {
    "vae": Recipe("catnat.lit_modules.DiscreteVAE", "mnist"),
    "mlp-vae": Recipe(
        "catnat.lit_modules.MLPDiscreteVAE",
        "mnist",
        defaults={"variant": "stochastic", "batch_size": 128},
    ),
    "gsl": Recipe(
        "catnat.lit_modules.GraphStructureLearner",
        "community-graph",
        *STEPS["gsl"],
        links=(
            ("communities", "num_nodes", "catnat.datamodules.community_graph.num_nodes"),
            ("in_features", "in_features", None),
            ("out_features", "out_features", None),
        ),
    ),
}
DATA = {
    "mnist": "catnat.datamodules.MNISTDataModule",
    "fashion-mnist": "catnat.datamodules.FashionMNISTDataModule",
    "kmnist": "catnat.datamodules.KMNISTDataModule",
    "community-graph": "catnat.datamodules.CommunityGraphDataModule",
}


def load(path: str) -> Any:
    """The object behind a path of ours, such as catnat.lit_modules.DiscreteVAE."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def find_model(names: Names) -> tuple[type, Recipe]:
    """The class of the model, and its recipe; sets the head of a model of the user's own.

    A subclass of one of our models takes that model's recipe.
    """
    from lightning.pytorch import LightningModule

    if names.model in RECIPES:
        recipe = RECIPES[names.model]
        return load(str(recipe.model)), recipe
    model = _own_class("--model", names.model, LightningModule)
    ours = {load(str(recipe.model)): recipe for recipe in RECIPES.values()}
    recipe = next((ours[each] for each in model.__mro__ if each in ours), Recipe())
    _set_head(names, model)
    return model, recipe


def _set_head(names: Names, model: type) -> None:
    """Take the model's default head if the command line has none."""
    from catnat import head_names

    head = arguments(model).get("head")
    if head is None:
        if names.head is not None:
            raise UsageError(f"--head {names.head}: {names.model} has no argument head")
    elif names.head is None:
        names.head = head.default if isinstance(head.default, str) else "natural"
    else:
        check_choice("--head", names.head, head_names())


def find_data(names: Names, recipe: Recipe) -> type:
    """The class of the data; sets the name of the data where the command line has none."""
    from lightning.pytorch import LightningDataModule

    names.data = names.data or recipe.data
    if names.data is None:
        choices = ", ".join(DATA)
        wanted = f"{choices}, or a class like my_module.MyDataModule"
        raise UsageError(f"--model {names.model} needs --data: {wanted}")
    if names.data not in DATA:
        return _own_class("--data", names.data, LightningDataModule)
    if recipe.model is not None:  # a built-in model takes the data of its kind
        kind = next(name for name, each in RECIPES.items() if each is recipe)
        check_choice("--data", names.data, LIGHTNING_MODELS[kind], "a class like my_module.MyData")
    return load(DATA[names.data])  # type: ignore[no-any-return]


def _own_class(option: str, path: str, base: type) -> type:
    """The class at a path such as my_module.MyVAE, which must be a subclass of base."""
    module, _, name = path.rpartition(".")
    if not module or not name:
        raise UsageError(
            f"{option} {path!r} should be a class like my_module.My{base.__name__[9:]}"
        )
    found = import_module(f"{option} {path}", module)
    if not hasattr(found, name):
        classes = [each for each, value in vars(found).items() if inspect.isclass(value)]
        raise UsageError(f"{option} {path}: {module} has no {name}{did_you_mean(name, classes)}")
    value = getattr(found, name)
    if not inspect.isclass(value) or not issubclass(value, base):
        raise UsageError(f"{option} {path} is no {base.__name__}, but {value!r}")
    if "name" in arguments(value):
        raise UsageError(
            f"{option} {path} has an argument called name, but {option}.name is the class: "
            "give the argument another name"
        )
    return value


def arguments(cls: type) -> dict[str, inspect.Parameter]:
    """The arguments of a class, those of its base classes included where it passes them on."""
    found: dict[str, inspect.Parameter] = {}
    for each in cls.__mro__:
        if "__init__" not in vars(each):
            continue
        parameters = inspect.signature(each.__init__).parameters  # type: ignore[misc]
        found = {**parameters, **found}
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            break
    return found
