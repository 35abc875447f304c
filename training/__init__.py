"""The training program: names, options, run folders, Lightning, PPO and reports."""
