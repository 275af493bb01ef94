"""What runs on each host of a job."""
