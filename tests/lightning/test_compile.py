"""A model that is compiled, ``torch.compile(model)``, is compiled once, not at every step."""

import pytest
import torch
from cases import slow
from cases_callbacks import quiet_trainer
from lightning.pytorch import Callback

from catnat.datamodules import CommunityGraphDataModule, MNISTDataModule
from catnat.lit_modules import DiscreteVAE, GraphStructureLearner, MLPDiscreteVAE

SIZES = {"num_latents": 2, "num_categories": 3}
MODELS = {
    "vae": lambda: DiscreteVAE(**SIZES),
    "mlp-vae": lambda: MLPDiscreteVAE(**SIZES),
    "graph": lambda: GraphStructureLearner(num_nodes=6),
}


class Graphs(Callback):
    """The backend of a compiler, and how many graphs it was given until the end of each step."""

    def __init__(self):
        self.given, self.until_step = 0, []

    def compile(self, graph, _):
        self.given += 1
        return graph

    def on_train_batch_end(self, *_):
        self.until_step.append(self.given)


@pytest.mark.parametrize("name", [slow("vae"), slow("mlp-vae"), "graph"])
def test_a_compiled_model_is_not_compiled_again_at_later_steps(name, data):
    batches = MNISTDataModule(str(data), batch_size=6, download=False)
    if name == "graph":  # equal batches: a smaller one is a reason to compile again
        batches = CommunityGraphDataModule(communities=1, num_pairs=320, batch_size=16)
    torch._dynamo.reset()
    graphs = Graphs()
    trainer = quiet_trainer(
        max_steps=6, log_every_n_steps=2, val_check_interval=3, callbacks=[graphs]
    )
    trainer.fit(torch.compile(MODELS[name](), backend=graphs.compile), datamodule=batches)
    before_training, *_ = graphs.until_step
    assert before_training > 0
    assert graphs.given == before_training, "neither later steps nor validations were compiled"
