"""What carries a bucket: ps-lite, a ring over MPI, or one process."""
