"""The page about the tags of a run, from the texts that TensorBoard shows."""

from catnat.callbacks.tensorboard import Kind, guide

MODELS: dict[Kind, str] = {"vae": "Discrete VAEs", "graph": "Graphs", "policy": "PPO and A2C"}
INTRODUCTION = """# Tags of a run

Every tag is a card in TensorBoard; see [the dashboard](dashboard.md).
[Fisher diagnostics](fisher.md#what-each-tag-means) says more about the first ones."""


def page() -> str:
    """Markdown: the tags of all models, then those of each model."""
    parts = [INTRODUCTION]
    for kind, title in MODELS.items():
        fisher, *others = guide(kind).split("\n\n## ")[1:]
        if len(parts) == 1:
            parts.append(f"## {fisher}")
        parts += [f"## {title}", *(f"### {each}" for each in others)]
    return "\n\n".join(parts) + "\n"
