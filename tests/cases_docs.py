"""Run what pages of Markdown show: ``python cases_docs.py blocks|commands PAGE...``.

A process of its own, because pages define heads, and write files to the present folder.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```", re.M | re.S)
NEEDS = re.compile(r"^Needs `pip install ([\w-]+)", re.M)  # for all that follows on the page
MODULES = {"pyro-ppl": "pyro"}  # where a package has another name
TITLE = re.compile(r'title="([\w./]+)"')  # of a block that is a file
PROGRAMS = ("python train.py", "catnat")


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """(what follows the language, content) of all blocks in one of the languages."""
    found = []
    for indent, language, rest, content in FENCE.findall(text):
        if language in languages:
            lines = content.splitlines(keepends=True)
            found.append((rest, "".join(line.removeprefix(indent) for line in lines)))
    return found


def run_blocks(page: Path) -> None:
    """The Python blocks of a page in order; one with a title becomes a file instead."""
    namespace = {"__name__": "page"}
    parts = NEEDS.split(page.read_text())
    for package, text in zip(["sys", *parts[1::2]], parts[::2], strict=True):
        if find_spec(MODULES.get(package, package)) is None:
            print(f"{page}: without {package}")
            continue
        for i, (rest, code) in enumerate(blocks(text, "python"), 1):
            if title := TITLE.search(rest):
                Path(title[1]).parent.mkdir(parents=True, exist_ok=True)
                Path(title[1]).write_text(code)
            else:
                place = f"{page}, {package}, block {i}"
                exec(compile(code, place, "exec"), namespace)


def commands(page: Path) -> list[list[str]]:
    """The words of all commands of ours in the shell blocks of a page."""
    lines = [
        line
        for _, text in blocks(page.read_text(), "bash", "sh")
        for line in text.replace("\\\n", " ").splitlines()
    ]
    starts = tuple(f"{program} " for program in PROGRAMS)
    return [shlex.split(line, comments=True) for line in lines if line.startswith(starts)]


def check_command(words: list[str]) -> None:
    """Ask a program for its configuration, or parse its options: nothing is trained."""
    if words[1:2] == ["compare"]:  # its runs are not there
        return
    if words[1] in ("sweep", "status", "tables", "figures"):
        check_sweep(words[1], words[2:])
        return
    import train

    argv = words[2:] if words[0] == "python" else words[1:]
    if argv[:1] == ["test"]:
        argv = argv[1:]
    if "--ckpt_path" in argv:  # the checkpoint is not there
        at = argv.index("--ckpt_path")
        argv = argv[:at] + argv[at + 2 :]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = train.main([*argv, "--print_config"])
    if status:
        raise SystemExit(f"{shlex.join(words)}: {said.getvalue()}")


def check_sweep(command: str, argv: list[str]) -> None:
    from catnat.sweeps import sweep

    names = [word for word in argv if word.endswith(".yaml")]
    if command == "sweep":
        options = argv[: argv.index("--")] if "--" in argv else argv
        names = sweep.build_parser().parse_args(options).plans
    for name in names:  # written by the page, otherwise in the repository
        assert Path(name).is_file() or (Path(__file__).parent.parent / name).is_file(), name


def main(what: str, pages: list[str]) -> None:
    start = Path.cwd()
    for page in map(Path, pages):
        folder = start / page.stem
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        if what == "blocks":
            run_blocks(page)
        else:
            for rest, code in blocks(page.read_text(), "python"):
                if title := TITLE.search(rest):
                    Path(title[1]).write_text(code)
            for words in commands(page):
                check_command(words)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
