"""``catnat report``: one page about runs, complete in itself."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import train
from catnat.training.html_charts import Chart, Scale
from catnat.training.html_report import page
from catnat.training.recorded_run import RecordedRun, read_run, thinned

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """Folders of a VAE with natural and one with softmax."""
    root = tmp_path_factory.mktemp("runs")
    vae = (
        f"--model=vae --data.root={data} --accelerator=cpu --batch_size=10 --max_steps=12 "
        "--nll_samples=2 --val_check_interval=6 --log_every_n_steps=1 --num_latents=3"
    )
    lines = {"vae/natural": vae, "vae/softmax": f"{vae} --head=softmax --seed=5"}
    for line in lines.values():
        assert train.main([*line.split(), f"--default_root_dir={root}"]) == 0
    return [root / name / "version_0" for name in lines]


@pytest.fixture(scope="module")
def text(runs, tmp_path_factory):
    """The page of the two VAEs."""
    out = tmp_path_factory.mktemp("out") / "new folder" / "page.html"
    assert train.main(["report", *map(str, runs), "--out", str(out)]) == 0
    return out.read_text()


def test_the_page_has_everything_about_the_runs(text, runs):
    for name in ("fim/off_diagonal_mass_fro", "val/elbo", "train/loss"):
        assert f"<b>{name}</b>" in text
    assert text.count('class="chart"') == len(set(re.findall(r"<b>([^<]+)</b>", text)))
    metrics = json.loads((runs[0] / "metrics.json").read_text())
    assert f"{metrics['test/nll']:.5g}" in text
    assert [f"step {step}</figcaption>" in text for step in (0, 10, 11)] == [True] * 3
    assert text.count('alt="fim/mean of') == 6, "three pictures of each run"
    assert 'alt="images/prior of natural"' in text and 'alt="latents/usage of softmax"' in text
    assert "Evidence lower bound" in text, "explanations come from the run"


def test_heads_lie_side_by_side(text):
    assert "<th>metric</th><th>natural</th><th>softmax</th>" in text
    assert "<th>model.head</th><td>natural</td><td>softmax</td>" in text
    assert "<th>seed</th><td>0</td><td>5</td>" in text
    for chart in re.findall(r'<figure class="chart".*?</figure>', text):
        assert 'class="run-0"' in chart and 'class="run-1"' in chart


def test_the_page_asks_for_no_other_file(text):
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert sources and all(each.startswith("data:image/") for each in sources)
    assert not re.search(r"url\(|@import|<link|fetch\(", text)
    hosts = set(re.findall(r"https?://[^/'\"\s]*", text))
    assert hosts == {"http://www.w3.org"}, "the name of SVG, which nobody asks for"


def test_a_game_is_shown_as_a_gif(tmp_path):
    run = RecordedRun(tmp_path, pictures={"game": [(8, b"GIF89a and so on")]})
    gif = base64.b64encode(b"GIF89a and so on").decode()
    assert '<img alt="game of ' in (text := page([run])) and f"data:image/gif;base64,{gif}" in text


def test_the_page_lies_here_if_nobody_says_where(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["report", str(runs[0])]) == 0
    assert capsys.readouterr().out == "report of 1 run: report.html\n"
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["."], ". is no run: it has no event file"),
        ([], "required: RUN"),
        (["{run}", "--output=x"], "unrecognized arguments: --output=x"),
        (["{run}", "--out=taken"], "--out taken: Is a directory"),
        (["{root}"], "did you mean {run}"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    argv, said, runs, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    names = {"run": runs[0], "root": runs[0].parent}
    assert train.main(["report", *(each.format(**names) for each in argv)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said.format(**names) in line


def test_a_broken_record_is_answered_in_one_line(runs, tmp_path, capfd):
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    (copy / "metrics.json").write_text("{")
    assert train.main(["report", str(copy), "--out", str(tmp_path / "x.html")]) == 2
    assert "metrics.json cannot be read" in capfd.readouterr().err


def test_a_run_in_progress_has_a_page(runs, tmp_path):
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    (copy / "metrics.json").unlink()
    (copy / "config.yaml").unlink()
    text = page([read_run(copy)])
    assert "not finished" in text and "<b>train/loss</b>" in text


def test_names_are_text_and_not_markup(tmp_path):
    evil = "<script>alert(1)</script>"
    run = RecordedRun(
        tmp_path, {"model.head": evil, "a": '"><b>'}, {evil: 1.0}, {f"val/{evil}": [(0, 1.0)]},
        {evil: [(0, PIXEL)]}, {f"val/{evil}": evil},
    )  # fmt: skip
    text = page([run])
    assert evil not in text and '"><b>' not in text


def test_runs_of_one_head_are_called_by_their_folders():
    folders = [Path("runs/vae/natural/version_0"), Path("runs/ppo/natural/version_0")]
    text = page([RecordedRun(each, {"model.head": "natural"}) for each in folders])
    assert "<span>vae/natural/version_0</span>" in text
    assert "<span>ppo/natural/version_0</span>" in text


def test_curves_with_nan_and_wide_ranges():
    nan = float("nan")
    chart = Chart("x", "", {0: [(0, nan), (1, 1.0), (2, 1e6)], 1: [(1, nan)]}).html()
    assert "(logarithmic)" in chart and "nan" not in chart.lower()
    assert Chart("x", "", {0: [(0, nan)]}).html() == ""
    assert "<circle" in Chart("x", "", {0: [(3, 2.0)]}).html()


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.7, 12), (1e-9, 2e-9), (5, 5), (1e7, 3e8)])
def test_axes_have_a_few_round_numbers(low, high):
    scale = Scale(low, high)
    assert 2 <= len(scale.ticks()) <= 7
    assert all(-1e-6 <= scale.share(each) <= 1 + 1e-6 for each in scale.ticks())


def test_thinned_curves_keep_the_extremes():
    curve = [(n, float(n % 7)) for n in range(10_000)]
    curve[5_003] = (5_003, 99.0)
    few = thinned(curve)
    assert len(few) <= 400 and (5_003, 99.0) in few
    assert [step for step, _ in few] == sorted(step for step, _ in few)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, to see the page as a reader does")
def test_the_page_works_in_a_browser(text, tmp_path):
    """Every curve is drawn, and a mouse over a chart shows the values of both runs."""
    move = (
        "<script>const svg = document.querySelector('.chart svg');"
        "const box = svg.getBoundingClientRect();"
        "svg.dispatchEvent(new MouseEvent('mousemove', {clientX: box.left + box.width / 2}));"
        "document.querySelectorAll('.legend input')[1].click();</script></body>"
    )
    (tmp_path / "page.html").write_text(text.replace("</body>", move))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    flags += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    found = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", f"file://{tmp_path / 'page.html'}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    dom = found.stdout
    assert dom.count('class="tip') == dom.count('class="chart"') > 5
    tip = re.search(r'<div class="tip" [^>]*>(.*?)</div></div>', dom)
    assert tip and "step " in tip[1] and "natural: " in tip[1] and "softmax: " in tip[1]
    assert 'class="run-1 hidden"' in dom and 'class="run-0 hidden"' not in dom
