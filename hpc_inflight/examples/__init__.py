"""Runnable programs that show the package at work; each is started with ``python -m`` alone or under mpirun/srun."""
