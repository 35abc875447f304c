"""What the true model scores on our graph data, beside the paper's row "Optimal value".

python experiments/gsl_optimal.py > results/gsl_optimal.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders of the checkout

from catnat.datamodules import CommunityGraphDataModule

HERE = Path(__file__).resolve().parent
METRICS = {"energy_score_2x": "energy_score", "pp_mae": "pp_mae", "pp_mse": "pp_mse"}


def main() -> None:
    """Print the table; data that are not there yet are generated under data/."""
    print("| θ* | 2 ES | PP-MAE | PP-MSE |\n|---|---|---|---|")
    for row in json.loads((HERE / "paper.json").read_text())["gsl"]:
        if row["head"] != "optimal":
            continue
        data = CommunityGraphDataModule(row["theta_star"])
        data.prepare_data()
        data.setup()
        cells = [str(row["theta_star"])]
        for ours, theirs in METRICS.items():
            value, paper = data.optimal[ours], row[theirs]["mean"]
            cells.append(f"{value:.4g} ({paper}, {value / paper - 1:+.1%})")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
