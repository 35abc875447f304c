"""The example project examples/language_model, trained on a tiny text by the command."""

import csv
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml

import train
from catnat import CatnatHead, make_head

PROJECT = Path(__file__).resolve().parents[2] / "examples" / "language_model"


@pytest.fixture
def project(monkeypatch, tmp_path):
    """The folder of the project, and a text in which one word tells the next."""
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(sys, "path", [*sys.path, str(PROJECT)])
    draw = random.Random(0)
    words = [f"w{n}" for n in range(60)]
    lines = []
    for _ in range(400):
        first = draw.randrange(60)
        lines.append(" ".join(words[(first + 7 * step) % 60] for step in range(12)) + ".\n")
    folder = tmp_path / "texts"
    folder.mkdir()
    for part in range(40):
        (folder / f"{part}.txt").write_text("".join(lines[10 * part : 10 * part + 10]))
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    return folder


def run(capsys, folder, root, *options, steps=30):
    command = ["--model", "language_model.LanguageModel", "--data", "language_model.TextData"]
    sizes = ["--vocabulary=64", "--width=16", "--length=8", "--batch_size=16", "--warmup=5"]
    where = [f"--path={folder}", f"--default_root_dir={root}", "--accelerator=cpu"]
    rate = ["--learning_rate=0.03", f"--max_steps={steps}", "--fisher.num_samples=0"]
    code = train.main([*command, *sizes, *where, *rate, *options])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def metric(out, name):
    line = next(line for line in out.splitlines() if f" {name} " in line)
    return float(line.split("│")[2])


OUTPUTS = {
    "softmax and tree": [],
    "natural": ["--head=natural", "--frequent=0"],
    "sigmoid by frequency": ["--head=sigmoid", "--order=frequency"],
    "softmax": ["--head=softmax"],
    "adaptive": ["--head=softmax", "--output=adaptive"],
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_every_output_learns_by_the_command(output, project, tmp_path, capsys):
    out = run(capsys, project, tmp_path, *OUTPUTS[output])
    assert metric(out, "test/perplexity") < 35  # 61 words, equally frequent but for the full stop
    assert 0 <= metric(out, "test/accuracy") <= 1


def test_a_checkpoint_brings_its_tree_whose_vocabulary_is_that_of_the_data(
    project, tmp_path, capsys
):
    out = run(capsys, project, tmp_path, "--head=natural", steps=10)
    (saved,) = tmp_path.rglob("config.yaml")
    assert yaml.safe_load(saved.read_text())["data"]["init_args"]["vocabulary"] == 64
    (last,) = tmp_path.rglob("last.ckpt")
    weights = torch.load(last, weights_only=True)["state_dict"]
    assert weights["output.weight"].shape == (55, 16)  # 64 words, 8 of them in the softmax
    assert weights["output.shortlist.weight"].shape == (9, 16)
    assert sorted(weights["output.order"].tolist()) == list(range(64))
    assert train.main(["test", "--ckpt_path", str(last)]) == 0
    again = capsys.readouterr().out
    assert metric(again, "test/perplexity") == metric(out, "test/perplexity")


def test_byte_pairs_report_perplexity_per_word(project, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    out = run(capsys, project, tmp_path, "--tokens=bpe", "--vocabulary=300", steps=5)
    per_token = metric(out, "test/loss")
    assert metric(out, "test/perplexity") > torch.tensor(per_token).exp()


def test_the_fisher_diagonal_of_a_large_tree_makes_no_matrix(monkeypatch):
    class OddHead(CatnatHead, name="odd-for-a-large-tree"):
        def log_activation(self, x):
            return torch.nn.functional.logsigmoid(-x), torch.nn.functional.logsigmoid(x)

    def refuse(*args):
        raise AssertionError("a matrix of S x S numbers")

    for head, dtype in ((OddHead(1000), torch.float32), (make_head("natural", 9), torch.float64)):
        scores = torch.randn(2, 3, head.num_scores, dtype=dtype)
        expected = head.fisher_diagonal(scores).mean(1)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "diag", refuse)
            patch.setattr(torch, "diag_embed", refuse)
            found = head.step_fishers(scores)
        torch.testing.assert_close(found, expected.float())


def test_batches_continue_each_other_and_none_is_lost(project):
    from language_model.data import Windows

    windows = Windows(torch.arange(4 * 25 + 3), rows=4, length=8)
    first, second = windows[0], windows[1]
    assert len(windows) == 3 and first.shape == (4, 9)
    assert first[:, 0].tolist() == [0, 25, 50, 75]
    assert torch.equal(first[:, -1], second[:, 0])


def test_tokens_and_order_are_made_once_and_kept(project, tmp_path, monkeypatch):
    from language_model import TextData

    def made(vocabulary):
        data = TextData(str(project), "words", vocabulary, 8, 4, cache=str(tmp_path / "kept"))
        data.setup()
        return data.stream["train"], data.order()

    stream, order = made(64)
    with monkeypatch.context() as patch:
        patch.setattr(TextData, "_tokenized", lambda *_: pytest.fail("text is tokenized again"))
        again = made(64)
        assert torch.equal(stream, again[0]) and torch.equal(order, again[1])
    assert made(32)[1].shape == (32,)  # another vocabulary is another file
    counts = torch.bincount(stream)
    assert torch.equal(counts, counts.sort(descending=True).values)
    data = TextData(str(project), "words", 64, 8, 4)
    data.setup()
    data.save(tmp_path / "tokens.npz")
    short = TextData(str(tmp_path / "tokens.npz"), "words", 64, 8, 4)
    short.setup()
    assert torch.equal(short.stream["test"], data.stream["test"])
    assert short.words_per_token == data.words_per_token
    assert not list((tmp_path / "kept").glob("*.[0-9]*"))  # no file is left half written


@pytest.mark.parametrize("output", ["softmax", "adaptive", "natural"])
def test_every_output_starts_from_how_frequent_words_are(output, project):
    from language_model import LanguageModel

    options = {"adaptive": {"output": "adaptive"}}.get(output, {"head": output})
    model = LanguageModel(vocabulary=64, width=4, **options)
    counts = torch.arange(64, 0, -1) ** 2
    if output == "natural":
        model.output.set_order(torch.randperm(64))
    model.output.start_from_counts(counts)
    if output == "softmax":
        logs = model.output.bias.log_softmax(0)
    else:
        all_words = model.output.log_probs if output == "natural" else model.output.log_prob
        logs = all_words(torch.zeros(1, 4))[0]
    smoothed = (counts + 1.0) / (counts + 1.0).sum()
    some = slice(4) if output == "adaptive" else slice(None)  # its groups have no biases
    torch.testing.assert_close(logs.exp()[some], smoothed[some], rtol=2e-2, atol=1e-4)


def test_the_loss_of_adaptive_softmax_is_that_of_torch(project):
    from language_model.model import AdaptiveOutput

    layer = AdaptiveOutput(8, 40, [4, 16])
    hidden, target = torch.randn(50, 8), torch.randint(40, (50,))
    expected = layer(hidden, target)
    torch.testing.assert_close(layer.nll(hidden, target), expected.loss)
    torch.testing.assert_close(layer.nll(hidden, target, "none"), -expected.output)


@pytest.mark.slow
def test_a_comparison_widens_its_rates_and_is_done_once(project, tmp_path, monkeypatch):
    import compare

    monkeypatch.setattr(compare, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(compare, "FREQUENT", 16)
    numbers = {"vocabulary": 64, "width": 8, "layers": 1, "rows": 8, "length": 4, "speed": 12}
    sizes = [f"--{name}={n}" for name, n in (numbers | {"steps": 20, "seeds": 2}).items()]
    where = ["--path", str(project), "--out", str(tmp_path / "out"), "--jobs=1", "--device=cpu"]
    outputs = ["softmax", "tree-apart", "tree", "tree-rowadam"]
    names = ["--outputs", *outputs, "--rates", "0.0001", "0.0002"]
    assert compare.main([*where, *sizes, *names]) == 0
    with open(tmp_path / "out" / "runs.csv") as file:
        rows = list(csv.DictReader(file))
    for output in outputs:
        runs = [row for row in rows if row["output"] == output]
        assert {row["rate"] for row in runs if row["seed"] == "0"} >= {"0.0004", "0.0008"}
        assert {row["seed"] for row in runs} == {"0", "1"}  # of the best rate
        assert len({row["steps"] for row in runs}) <= 2  # and fewer, in equal time
        assert 0 <= float(runs[0]["accuracy"]) <= 1 < float(runs[0]["test_rare"])
    monkeypatch.setattr(compare, "do_run", lambda *_: pytest.fail("a run is done again"))
    assert compare.main([*where, *sizes, *names]) == 0
