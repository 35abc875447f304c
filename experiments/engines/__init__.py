"""Where runs are made: on this machine, on Ray, as SLURM jobs, or by hand."""
