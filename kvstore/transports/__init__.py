"""What carries a bucket: ps-lite, sockets, MPI, gloo, or one process."""
