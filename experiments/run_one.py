"""Do one run as a sweep does it: with its lock, its log, its checkpoint and its failure record.

    python experiments/run_one.py HOME [--retries 1] -- python train.py --model=vae ...

HOME is the folder of the run. ``sweep.py --engine print`` and ``--engine slurm`` write such lines.
Exit status: 0 finished, 1 given up, 143 interrupted.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from experiments.command_line import Parser
from experiments.engines.execute import execute
from experiments.engines.processes import Children
from experiments.plan import Run


def main(argv: list[str] | None = None) -> int:
    """Run the command that comes after ``--``."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser("run_one.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("home", type=Path, help="folder of the run")
    parser.add_argument("--retries", type=int, default=1, help="of a run that fails (default 1)")
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    command = tuple(argv[split + 1 :])
    if not command:
        parser.error("expected the command of the run after --")
    children = Children()

    def stop(signum: int, frame: FrameType | None) -> None:
        children.stop()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        run = Run({}, {}, None, args.home, args.home, command, Path.cwd())
        outcome = execute(run, args.retries, children)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"{args.home}: {outcome}", flush=True)
    return {"finished": 0, "failed": 1}.get(outcome, 128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
