"""A world model with discrete latents in JAX, trained with natural beside softmax.

A ball bounces in a box of 8 x 8 pixels. An encoder maps two frames to N latents of K categories,
drawn with straight-through gradients and with 1 % of the uniform distribution mixed in. A decoder
draws the frames from the latents, and the dynamics predict the next latents. The loss is the error
of the reconstruction plus the KL divergence from the prediction. After training, the dynamics go on
alone, and the picture shows what they imagine below what happens:

    python examples/jax_world_model.py --out world_model.png
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from catnat.jax import make_head

N, K, SIZE, HIDDEN, LENGTH, BATCH, PAIR = 8, 8, 8, 128, 12, 16, 2 * 8**2  # pixels of two frames
HEADS = (make_head("softmax", K, mix=0.01), make_head("natural", K, tail=0.05, mix=0.01))


def bouncing_balls(rng, count):
    """Pairs of frames, (count, LENGTH, PAIR): a pair shows where the ball goes."""
    phase, speed = rng.uniform(0, 14, (count, 1, 2)), rng.uniform(0.5, 1, (count, 1, 2))
    place = np.abs((phase + speed * np.arange(LENGTH + 1)[:, None]) % 14 - 7)  # in 0..7
    row, column = np.moveaxis(np.exp(-((place[..., None] - np.arange(SIZE)) ** 2)), 2, 0)
    frames = (row[..., :, None] * column[..., None, :]).reshape(count, LENGTH + 1, SIZE**2)
    return np.concatenate((frames[:, :-1], frames[:, 1:]), -1).astype(np.float32)


def init(key, inputs, outputs):
    """Two layers of weights, without biases: exactly one category of a latent is always on."""
    layers = zip(jax.random.split(key), ((inputs, HIDDEN), (HIDDEN, outputs)), strict=True)
    return [jax.random.normal(k, shape) / shape[0] ** 0.5 for k, shape in layers]


def network(weights, x):
    """The outputs of the two layers."""
    return jax.nn.elu(x @ weights[0]) @ weights[1]


def latents(head, weights, x):
    """The distribution of the latents, batch shape (..., N)."""
    return head(network(weights, x).reshape(*x.shape[:-1], N, head.num_scores))


def loss(params, head, frames, key):
    """Reconstruction and prediction of sequences, (BATCH, LENGTH, PAIR)."""
    q = latents(head, params["encoder"], frames)
    z = q.rsample_straight_through(seed=key).reshape(*frames.shape[:2], N * K)
    error = ((network(params["decoder"], z) - frames) ** 2).sum(-1).mean()
    prior, after = latents(head, params["dynamics"], z[:, :-1]), head(q.scores[:, 1:])
    return error + 0.1 * after.kl_divergence(prior).sum(-1).mean(), error


@jax.jit
def update(head, step, params, m, v, frames):
    """One step of Adam."""
    noise = jax.random.fold_in(jax.random.key(1), step)
    (_, error), grad = jax.value_and_grad(loss, has_aux=True)(params, head, frames, noise)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grad)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grad)
    rate = 2e-3 * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, m, v)
    return params, m, v, error


def train(head, steps):
    """Parameters after training, and the error of the last reconstruction."""
    rng, S = np.random.default_rng(0), N * head.num_scores
    sizes = {"encoder": (PAIR, S), "decoder": (N * K, PAIR), "dynamics": (N * K, S)}
    params = {k: init(jax.random.key(i), *size) for i, (k, size) in enumerate(sizes.items())}
    m = v = jax.tree.map(jnp.zeros_like, params)
    for step in range(1, steps + 1):
        params, m, v, error = update(head, step, params, m, v, bouncing_balls(rng, BATCH))
    return params, float(error)


def imagine(head, params, frames):
    """Frames that the dynamics imagine after the first ones, with the likeliest latents."""
    q, dream = latents(head, params["encoder"], frames[0]), []
    for _ in range(LENGTH):
        z = jax.nn.one_hot(q.mode(), K).reshape(N * K)
        dream.append(network(params["decoder"], z))
        q = latents(head, params["dynamics"], z)
    return np.stack(dream)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A discrete world model", usage=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("world_model.png"))
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    folder = options.out.parent
    if options.out.suffix not in (".png", ".pdf", ".svg") or not folder.is_dir():
        kinds = "a .png, .pdf or .svg in a folder that exists"
        parser.error(f"--out must be {kinds}, got {str(options.out)!r}")
    rows = {"what happens": bouncing_balls(np.random.default_rng(1), 1)[0]}
    for head in HEADS:
        params, error = train(head, options.steps)
        rows[head.name] = imagine(head, params, rows["what happens"])
        print(f"{head.name}: squared error of the reconstruction {error:.3f}")
    figure, axes = plt.subplots(len(rows), 1, figsize=(LENGTH, 4), layout="constrained")
    for (name, frames), axis in zip(rows.items(), axes, strict=True):
        axis.imshow(np.hstack(frames[:, SIZE**2 :].reshape(-1, SIZE, SIZE)), vmin=0, vmax=1)
        axis.set(title=name, xticks=SIZE * np.arange(LENGTH) - 0.5, yticks=[], xticklabels=[])
    figure.savefig(options.out)
