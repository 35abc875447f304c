"""--seeds: a sweep without a plan, a table and a picture."""

import pytest
import scipy.stats
from torch.utils.tensorboard import SummaryWriter

from catnat.sweeps import runs, seeds, sweep

LOSSES = {1: 3.0, 2: 5.0, 3: 4.0}


class Engine:
    """Does a run at once: a curve, and metrics that depend on the seed."""

    jobs = 1

    def __init__(self):
        self.options = []

    def execute(self, run, folder):
        options = run.options
        self.options.append(options)
        loss = LOSSES[options["seed"]]
        with SummaryWriter(str(folder / "version_0")) as writer:
            for step in range(3):
                writer.add_scalar("val/loss", loss - step, step)
        return {"test/nll": loss, "val/loss": loss - 2, "test/constant": 7.0}

    def stop(self):
        pass


@pytest.fixture
def engine(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(sweep, "make_engine", lambda *_: engine)
    return engine


def test_seeds_end_with_a_table_and_a_picture_and_are_not_repeated(engine, tmp_path, capsys):
    argv = ["fit", "--model", "vae", "--head=sigmoid", "--max-steps", "9"]
    argv += [f"--default_root_dir={tmp_path}"]
    assert seeds.main(argv, [1, 2]) == 0
    assert seeds.main(argv, [1, 2, 3]) == 0
    assert [options["seed"] for options in engine.options] == [1, 2, 3]
    assert engine.options[0] == {
        "model": "vae",
        "head": "sigmoid",
        "max_steps": "9",
        "seed": 1,
    }
    text = capsys.readouterr().out
    half = scipy.stats.t.ppf(0.975, 2) / 3**0.5
    (line,) = (line for line in text.splitlines()[-6:] if line.startswith("test/nll"))
    assert line.split() == ["test/nll", "4", "1", f"{4 - half:.5g}", "to", f"{4 + half:.5g}", "3"]
    assert "7 to 7" in text
    folder = tmp_path / "seeds-vae-sigmoid"
    assert (folder / "val_loss.png").stat().st_size > 0
    assert len(runs.read(folder / "runs.csv")) == 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seed=1"], "--seed cannot be given beside --seeds"),
        (["--ckpt_path=last"], "--ckpt_path cannot be given beside --seeds"),
        (["test"], "'test' is not an option"),
        (["--head"], "--head needs a value"),
        (["--head=naturl"], "natural"),
        (["--max_stepz=3"], "max_steps"),
    ],
)
def test_a_wrong_command_line_is_refused_before_the_first_run(argv, words, engine, tmp_path):
    with pytest.raises(ValueError, match=words):
        seeds.main([*argv, f"--default_root_dir={tmp_path}"], [1, 2])
    assert not engine.options
