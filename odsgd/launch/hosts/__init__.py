"""Where processes start: this machine, ssh, MPI, Slurm, Kubernetes."""
