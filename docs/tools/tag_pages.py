"""The page about the tags of a run, from the text that TensorBoard shows."""

from catnat.callbacks.tensorboard import guide

INTRODUCTION = """# Tags of a run

Every tag is a card in TensorBoard; see [the dashboard](dashboard.md).
[Fisher diagnostics](fisher.md#what-each-tag-means) says more about the first ones. The other tags
of PPO and A2C are [those of Stable-Baselines3][sb3].

[sb3]: https://stable-baselines3.readthedocs.io/en/master/common/logger.html"""


def page() -> str:
    """Markdown: our own tags, with what each means."""
    return f"{INTRODUCTION}\n\n{guide()}\n"
