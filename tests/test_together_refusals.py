"""What cannot be trained together is refused in one line, before anything is trained."""

import pytest
from cases import slow
from cases_together import write_plan

from experiments import sweep


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--precision=bf16-mixed"], "does not know --precision bf16-mixed"),
        slow(["--lr_decay=0.9"], "lr_decay 1, got 0.9"),
        slow(["--headd=x"], "headd"),
        (["--val_check_interval=0.5"], "--val_check_interval, got 0.5"),
        slow(["--check_val_every_n_epoch=1"], "does not know --check_val_every_n_epoch 1"),
        (["--max_steps=0"], "--max_steps, got 0"),
    ],
)
def test_options_that_a_group_cannot_have_are_named(options, says, tmp_path, data, capsys):
    path = write_plan(tmp_path, "vae", data)
    with pytest.raises(SystemExit) as end:
        sweep.main([str(path), f"--runs={tmp_path}/runs", "--engine=together", "--", *options])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_model_that_has_no_batched_form_is_named(capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        sweep.main(
            ["ppo_cartpole", "--scale=smoke", f"--runs={tmp_path}/runs", "--engine=together"]
        )
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--engine together cannot train --model ppo" in line


def test_a_program_of_ones_own_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        sweep.main(["figure_landscapes", f"--runs={tmp_path}/runs", "--engine=together"])
    assert "trains models of train.py alone" in capsys.readouterr().err


def test_options_of_other_engines_are_refused(capsys):
    with pytest.raises(SystemExit):
        sweep.main(["gsl", "--engine=together", "--jobs_per_gpu=2"])
    assert "--jobs_per_gpu: not with --engine together" in capsys.readouterr().err
