"""Between the processes of a job, beside the data: reports, deadlines, signed commands, agreement."""
