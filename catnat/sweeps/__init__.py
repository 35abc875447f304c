"""The paper's tables and figures: what they consist of, how they are run, and what came out."""
