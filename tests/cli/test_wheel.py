"""What a user gets who installs the wheel, and the example project that runs on it."""

import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from cases_mnist import write_mnist

pytestmark = pytest.mark.slow  # builds, installs, and imports everything again

ROOT = Path(__file__).resolve().parents[2]
HOMES = ("callbacks", "datamodules", "lit_modules")  # packages of catnat

# What a requirement is called when it is imported.
OTHER_NAMES = {"pyyaml": "yaml", "opencv-python-headless": "cv2"}

# Runs the example as `python -m` does, then says where everything of ours came from.
DRIVER = f"""
import json, runpy, sys
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_module("own_project.train", run_name="__main__", alter_sys=True)
ours = {("catnat", "own_project", *HOMES)!r}
loaded = {{n: m.__file__ for n, m in list(sys.modules.items()) if n.split(".")[0] in ours}}
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A copy of all files that git does not ignore: building leaves the checkout as it is."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    copy = tmp_path_factory.mktemp("checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def source(tracked, tmp_path_factory):
    """The source distribution."""
    folder = tmp_path_factory.mktemp("source")
    run_module("build", "--sdist", "--no-isolation", "--outdir", str(folder), cwd=tracked)
    (archive,) = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel, built from the source distribution alone."""
    folder = tmp_path_factory.mktemp("wheels")
    pip("wheel", "--no-build-isolation", f"--wheel-dir={folder}", str(source))
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A folder with nothing but the installed wheel."""
    site = tmp_path_factory.mktemp("site")
    pip("install", f"--target={site}", str(wheel))
    return site


def pip(command, *arguments):
    offline = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    run_module("pip", command, *offline, *arguments)


def run_module(*words, cwd=None):
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_source_distribution_and_wheel_can_be_published(source, wheel):
    run_module("twine", "check", "--strict", str(source), str(wheel))


def test_site_packages_get_one_package(site):
    found = sorted(path.name.split("-")[0] for path in site.iterdir())
    assert found == ["bin", "catnat", "catnat"]
    assert [path.name for path in (site / "bin").iterdir()] == ["catnat"]  # the command
    assert (site / "catnat" / "py.typed").exists()


def test_every_module_is_installed(tracked, site):
    expected = {path.relative_to(tracked) for path in (tracked / "catnat").rglob("*.py")}
    for side in HOMES:
        paths = (tracked / side).rglob("*.py")
        expected |= {Path("catnat", path.relative_to(tracked)) for path in paths}
    assert {path.relative_to(site) for path in (site / "catnat").rglob("*.py")} == expected


@pytest.mark.skipif(
    shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is None,
    reason="no C compiler",
)
def test_native_kernels_are_inside_and_load(site, tmp_path):
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    names = ["_cpu"]
    if platform.machine().lower() in ("x86_64", "amd64"):
        names += ["_cpu_avx2", "_cpu_avx512"]
    for name in names:
        assert (site / "catnat" / "kernels" / f"{name}{suffix}").exists()
    code = "from catnat.kernels.cpu import library; print(library()._name)"
    done = run_installed(["-W", "error", "-c", code], tmp_path, site)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(site)


def test_metadata_lists_what_is_imported(site):
    """A package without an extra, of the extra that a folder is for, or of train."""
    (folder,) = site.glob("catnat-*.dist-info")
    extras = {"": set(), "train": set(), "sweep": set(), "jax": set(), "maskable": set()}
    extras["hf"] = set()
    for line in Distribution.at(folder).requires or []:
        extra = re.search(r'extra == "(\w+)"', line)
        name = re.match(r"[\w-]+", line)[0]
        module = OTHER_NAMES.get(name, name.replace("-", "_"))
        extras.get(extra[1] if extra else "", set()).add(module)
    always = extras[""] | sys.stdlib_module_names | {"catnat", "triton"}  # torch brings triton
    light = {"kernels", "jax"}  # and the files of catnat/ itself, except the three below
    late = {
        "metrics.py": "torchmetrics",
        "graphs.py": "torch_geometric",
        "lightning_compat.py": "lightning",
    }
    unlisted = set()
    for path in (site / "catnat").rglob("*.py"):
        room = path.relative_to(site / "catnat").parts[0]
        extra = {"sweeps": "sweep", "sb3": "maskable", "integrations": "hf"}.get(room, room)
        allowed = always | extras.get(extra, set())
        if room not in light and not room.endswith(".py"):
            allowed |= extras["train"]
        names = top_level_imports(path) - allowed - {late.get(room)}
        unlisted |= {(str(path.relative_to(site)), name) for name in names}
    assert unlisted == set()


def top_level_imports(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
    return names


def run_installed(words, cwd, *packages):
    """Run Python with these folders of packages, and none of the checkout's."""
    # Without the module "site" an editable install of the checkout cannot step in.
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return subprocess.run(
        [sys.executable, "-S", "-P", *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, packages), *installed])},
        capture_output=True,
        text=True,
    )


def test_the_command_catnat_trains_from_an_empty_folder(site, tmp_path):
    command = str(site / "bin" / "catnat")
    options = ["--model=gsl", "--head=natural", "--max_steps=5", "--test_passes=1"]
    done = run_installed([command, *options], tmp_path, site)
    assert done.returncode == 0, done.stderr
    assert "test/gap_2x" in done.stdout
    assert (tmp_path / "runs/gsl/natural/version_0/metrics.json").is_file()
    wrong = run_installed([command, "--model=gsll"], tmp_path, site)  # before torch is imported
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("catnat: unknown model 'gsll'; did you mean gsl? choose from")


def test_the_example_project_runs_on_it(tracked, site, tmp_path):
    project, source = tmp_path / "project", tracked / "examples" / "own_project"
    pip("install", "--no-build-isolation", f"--target={project}", str(source))
    images = write_mnist(tmp_path, 150, 10)
    options = ["--steps=3", f"--root={images}", "--nll-samples=4"]
    done = run_installed(["-c", DRIVER, *options], tmp_path, site, project)
    assert done.returncode == 0, done.stderr
    said, loaded = done.stdout.rsplit("\n", 2)[:2]
    assert "ProbitHead after 3 steps" in said
    assert 0 < float(re.search(r"test NLL (\S+) nats", said)[1]) < 2000
    assert "Fisher mass 0.000" in said  # diagonal, as for every catnat head
    files = json.loads(loaded)
    used = {"catnat.callbacks", "catnat.datamodules", "catnat.lit_modules", "own_project.heads"}
    assert used <= set(files)
    for name, file in files.items():
        assert Path(file).is_relative_to(site if name.startswith("catnat") else project), name
