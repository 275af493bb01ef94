"""What people see of a running job."""
