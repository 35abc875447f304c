"""Sweeps: plans of many runs, engines that do them, tables and figures of what they found."""
