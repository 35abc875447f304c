"""Pictures of the heads: how probability moves with a score, and the Fisher matrix.

The build of the site draws them. That of the README is committed, and drawn again by

    python docs/tools/pictures.py
"""

from pathlib import Path
from typing import Any

from cache import fingerprint, is_fresh

K = 8
COLOURS = {  # those of catnat/sweeps/figures.py
    "softmax": "#0072B2",
    "sparsemax": "#E69F00",
    "sigmoid": "#009E73",
    "natural": "#D55E00",
}


def draw(folder: Path) -> list[Path]:
    """Draw all pictures into a folder, unless they are there already."""
    number, stamp = fingerprint(Path(__file__)), folder / "stamp"
    if not is_fresh(stamp, number):
        folder.mkdir(parents=True, exist_ok=True)
        _draw_all(folder)
        stamp.write_text(number)
    return sorted(folder.glob("*.png"))


def _draw_all(folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"figure.dpi": 150, "figure.constrained_layout.use": True, "font.size": 9}
    for name in COLOURS:
        _save(_curve(name), folder / f"{name}_curve.png")
        _save(_matrices((name,)), folder / f"{name}_fisher.png")
    _save(_matrices(tuple(COLOURS)), folder / "fisher.png")
    _save(_tree(), folder / "tree.png")
    _save(_all_curves(), folder / "curves.png")
    _save(_tails(), folder / "tail.png")
    _save(_paths(), folder / "paths.png")


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _two_categories(name: str, **options: float) -> tuple[Any, Any, Any]:
    """Scores of one binary choice, the probability of its second outcome, and its information."""
    import torch

    from catnat import make_head

    head = make_head(name, 2, **options)
    s = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    scores = s[:, None] if head.num_scores == 1 else torch.stack([0 * s, s], 1)
    return s, head.probs(scores)[:, 1], head.fisher_diagonal(scores)[:, -1]


def _paths() -> Any:
    """Errors of estimates of KL divergence and entropy from one sample, over the categories."""
    import matplotlib.pyplot as plt
    import torch
    from torch.distributions import kl_divergence

    from catnat import make_head

    sizes = [2**power for power in range(3, 16, 2)]
    kl: dict[str, list[float]] = {"log q - log p": [], "r - 1 - log r": [], "path": []}
    entropy: dict[str, list[float]] = {"-log q": [], "path": []}
    generator = torch.Generator().manual_seed(0)
    for K in sizes:
        head = make_head("sigmoid", K)
        scores = torch.randn(K - 1, generator=generator, dtype=torch.float64).expand(1000, -1)
        moved = scores + 0.1 * torch.randn(K - 1, generator=generator, dtype=torch.float64)
        q, p = head(scores), head(moved)
        c = head.sample(scores, generator=generator)
        log_ratio = p.log_prob(c) - q.log_prob(c)
        exact = kl_divergence(head(scores[:1]), head(moved[:1]))
        for each, values in zip(
            kl.values(),
            (-log_ratio, log_ratio.exp() - 1 - log_ratio, q.path_kl(p, c)),
            strict=True,
        ):
            each.append(float((values - exact).square().mean().sqrt()))
        spread = head(scores[:1]).entropy()
        for each, values in zip(entropy.values(), (-q.log_prob(c), q.path_entropy(c)), strict=True):
            each.append(float((values - spread).square().mean().sqrt()))
    figure, panels = plt.subplots(1, 2, figsize=(7.5, 2.8))
    colours = {"path": COLOURS["sigmoid"], "r - 1 - log r": "#999999"}
    for axes, title, errors in zip(
        panels, ("KL divergence", "entropy"), (kl, entropy), strict=True
    ):
        for label, found in errors.items():
            axes.plot(sizes, found, "o-", label=label, color=colours.get(label, "#000000"), ms=3)
        axes.set(title=title, xlabel="categories K", xscale="log", yscale="log")
        axes.set_ylabel("error of one sample (nats)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure


def _curve(name: str) -> Any:
    """a(s) of a binary choice, and the Fisher information of its score."""
    import matplotlib.pyplot as plt

    s, a, information = _two_categories(name)
    figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.4))
    left.plot(s, a, color=COLOURS[name])
    left.set(title="probability", xlabel="score $s$", ylabel="$a(s)$", ylim=(-0.05, 1.05))
    right.plot(s, information, color=COLOURS[name])
    top = 0.3 if float(information.max()) < 0.3 else 2.0
    right.set(title="Fisher information", xlabel="score $s$", ylim=(-0.02 * top, top))
    right.set_ylabel("$a'^2 / (a (1 - a))$")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def _all_curves() -> Any:
    """a(s) and its information, all heads in one picture."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 2.8))
    for name, colour in COLOURS.items():
        s, a, information = _two_categories(name)
        line = {"color": colour, "label": name, "zorder": 3, "linestyle": "-"}
        if name == "softmax":  # with two categories it is the sigmoid
            line |= {"zorder": 4, "linestyle": (0, (3, 3))}
        left.plot(s, a, **line)
        right.plot(s, information, **line)
    left.set(title="probability of one of two categories", xlabel="score $s$")
    right.set(title="Fisher information of the score", xlabel="score $s$", ylim=(-0.03, 1.1))
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def _tails() -> Any:
    """Natural without a tail and with two: a(s), the rare side's logarithm, and information."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(9, 2.7))
    for tail, colour in ((0, COLOURS["natural"]), (0.005, "C4"), (0.05, "C9")):
        s, a, information = _two_categories("natural", tail=tail)
        line = {"color": colour, "label": f"tail {tail}" if tail else "no tail"}
        for axes, values in zip(panels, (a, a, information), strict=True):
            axes.plot(s, values, **line)
    panels[0].set(title="probability $a(s)$")
    panels[0].legend(frameon=False)
    panels[1].set(title="the rare side", yscale="log", ylim=(1e-5, 1), xlim=(-5, 0))
    panels[2].set(title="Fisher information", ylim=(-0.01, 0.3))
    for axes in panels:
        axes.set_xlabel("score $s$")
        axes.grid(alpha=0.3)
    return figure


def _matrices(names: tuple[str, ...]) -> Any:
    """The Fisher matrix of each head at one and the same distribution over K categories."""
    import matplotlib.pyplot as plt
    import torch

    from catnat import make_head
    from catnat.fisher import off_diagonal_mass

    noise = torch.Generator().manual_seed(3)
    probs = torch.softmax(torch.randn(K, generator=noise, dtype=torch.float64), 0)
    figure, panels = plt.subplots(
        1, len(names), figsize=(2.6 * len(names) + 0.7, 2.7), squeeze=False
    )
    for axes, name in zip(panels[0], names, strict=True):
        head = make_head(name, K)
        fisher = head.fisher(head.inverse(probs))
        mass = float(off_diagonal_mass(fisher, norm="fro"))
        shown = axes.imshow(fisher / fisher.abs().max(), cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set(title=f"{name}: off-diagonal {mass:.2f}", xticks=[], yticks=[])
        axes.set_xlabel(f"{head.num_scores} scores")
    figure.colorbar(shown, ax=panels, shrink=0.85, label="entry / largest entry")
    return figure


def _two_fisher_matrices() -> Any:
    """The README's picture: two heads at the same random batch of distributions."""
    import matplotlib.pyplot as plt
    import torch

    from catnat import make_head

    rng = torch.Generator().manual_seed(3)
    scores = torch.randn(K, generator=rng) + torch.randn(64, K, generator=rng)
    probs = torch.softmax(scores.double(), -1)  # (64, K)
    figure, panels = plt.subplots(1, 2, figsize=(6.2, 2.9))
    titles = {"softmax": "softmax: dense", "natural": "natural: diagonal"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        head = make_head(name, K)
        fisher = head.mean_fisher(head.inverse(probs))
        shown = axes.imshow(fisher / fisher.abs().max(), cmap="RdBu_r", vmin=-0.6, vmax=0.6)
        axes.set(title=title, xticks=[], yticks=[])
        axes.set_xlabel(f"{head.num_scores} scores")
    figure.colorbar(shown, ax=panels, shrink=0.85, extend="max", label="entry / largest entry")
    return figure


def _tree() -> Any:
    """A tree over four categories, with the probabilities of the branches."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 2.3))
    nodes = {(3, 2): "$s_1$", (1, 1): "$s_2$", (5, 1): "$s_3$"}
    leaves = {(0, 0): "$p_0$", (2, 0): "$p_1$", (4, 0): "$p_2$", (6, 0): "$p_3$"}
    for (x, y), (left, right), i in (
        ((3, 2), ((1, 1), (5, 1)), 1),
        ((1, 1), ((0, 0), (2, 0)), 2),
        ((5, 1), ((4, 0), (6, 0)), 3),
    ):
        for (to_x, to_y), text, side in ((left, "1 - a(s_{%d})", -1), (right, "a(s_{%d})", 1)):
            axes.plot([x, to_x], [y, to_y], color="gray", zorder=1)
            at_x, at_y = (x + to_x) / 2 + 0.15 * side, (y + to_y) / 2 + 0.12
            text = f"${text % i}$"
            axes.text(at_x, at_y, text, ha="right" if side < 0 else "left", fontsize=8)
    for (x, y), text in {**nodes, **leaves}.items():
        colour = "#e8eaf6" if (x, y) in nodes else "white"
        axes.text(x, y, text, ha="center", va="center", bbox={"fc": colour, "boxstyle": "round"})
    axes.set(xlim=(-0.8, 6.8), ylim=(-0.3, 2.3))
    axes.axis("off")
    return figure


if __name__ == "__main__":
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"figure.dpi": 120, "figure.constrained_layout.use": True}
    _save(_two_fisher_matrices(), Path(__file__).resolve().parent.parent / "assets" / "fisher.png")
