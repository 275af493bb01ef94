"""What runs on each host of a job: ``python -m odsgd.launch.agent``."""
