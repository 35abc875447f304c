"""A world model in JAX that imagines a bouncing ball, with softmax and with natural.

An encoder maps two frames to 8 latents with 8 categories each, with straight-through samples and a
mix of 1 %. A decoder reconstructs the frames, and a dynamics network predicts the next latents.
"""

import argparse
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

from catnat.jax import make_head

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
parser.add_argument("--out", type=Path, default=Path("jax_world_model.png"), help="picture file")
parser.add_argument("--steps", type=int, default=2000, help="updates with each head")
args = parser.parse_args()
if not (args.out.parent.is_dir() and args.out.suffix in (".png", ".pdf", ".svg")):
    got = repr(str(args.out))
    parser.error(f"--out must be a .png, .pdf or .svg in a folder that exists, got {got}")
if args.steps < 1:
    parser.error(f"--steps must be at least 1, got {args.steps}")
N, K, SIZE, LENGTH, PAIR = 8, 8, 8, 12, 2 * 8**2  # PAIR: pixels of two frames


def bouncing_balls(rng, count):  # (count, LENGTH, PAIR): two frames show the direction
    phase, speed = rng.uniform(0, 14, (count, 1, 2)), rng.uniform(0.5, 1, (count, 1, 2))
    place = np.abs((phase + speed * np.arange(LENGTH + 1)[:, None]) % 14 - 7)  # in 0..7
    row, column = np.moveaxis(np.exp(-((place[..., None] - np.arange(SIZE)) ** 2)), 2, 0)
    frames = (row[..., :, None] * column[..., None, :]).reshape(count, LENGTH + 1, SIZE**2)
    return np.concatenate((frames[:, :-1], frames[:, 1:]), -1).astype(np.float32)


def network(weights, x):
    return jax.nn.elu(x @ weights[0]) @ weights[1]


def latents(head, weights, x):
    return head(network(weights, x).reshape(*x.shape[:-1], N, head.num_scores))


def loss(params, head, frames, step):
    q = latents(head, params["encoder"], frames)
    z = q.rsample_straight_through(seed=jax.random.key(step)).reshape(*frames.shape[:2], N * K)
    error = ((network(params["decoder"], z) - frames) ** 2).sum(-1).mean()
    prior, after = latents(head, params["dynamics"], z[:, :-1]), head(q.scores[:, 1:])
    return error + 0.1 * after.kl_divergence(prior).sum(-1).mean(), error


@jax.jit
def adam(head, step, params, m, v, frames):
    (_, error), grad = jax.value_and_grad(loss, has_aux=True)(params, head, frames, step)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grad)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grad)
    rate = 2e-3 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
    return jax.tree.map(lambda p, m, v: p - rate * m / (v**0.5 + 1e-8), params, m, v), m, v, error


rows = {"what happens": bouncing_balls(np.random.default_rng(1), 1)[0]}
for head in (make_head("softmax", K, mix=0.01), make_head("natural", K, tail=0.05, mix=0.01)):
    rng, S = np.random.default_rng(0), N * head.num_scores
    sizes = {"encoder": (PAIR, S), "decoder": (N * K, PAIR), "dynamics": (N * K, S)}
    params = {
        name: [rng.normal(size=(n, m)) / n**0.5 for n, m in ((inputs, 128), (128, outputs))]
        for name, (inputs, outputs) in sizes.items()
    }
    m = v = jax.tree.map(lambda p: 0 * p, params)
    for step in range(1, args.steps + 1):
        params, m, v, error = adam(head, step, params, m, v, bouncing_balls(rng, 16))
    q, dream = latents(head, params["encoder"], rows["what happens"][0]), []
    for _ in range(LENGTH):
        z = jax.nn.one_hot(q.mode(), K).reshape(N * K)
        dream.append(network(params["decoder"], z))
        q = latents(head, params["dynamics"], z)
    rows[f"imagined with {head.name}"] = np.stack(dream)
    print(f"{head.name}: squared error of the reconstruction {error:.3f}")
figure, panels = plt.subplots(len(rows), 1, figsize=(9, 3.4), layout="constrained")
for axes, (name, frames) in zip(panels, rows.items(), strict=True):
    axes.imshow(np.hstack(frames[:, SIZE**2 :].reshape(-1, SIZE, SIZE)), vmin=0, vmax=1)
    axes.set(title=name, xticks=SIZE * np.arange(1, LENGTH) - 0.5, yticks=[], xticklabels=[])
figure.savefig(args.out, dpi=120)
